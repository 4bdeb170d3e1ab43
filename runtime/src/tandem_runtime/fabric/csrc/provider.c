/* Finds libfabric and the provider to use. Knows: where the library lies, what fi_getinfo answers. Does not know: endpoints, memory.
 *
 * libfabric is loaded at run time and never bundled: a second copy in the process makes other users of the fabric (aws-ofi-nccl) lose their
 * NIC. Only its handful of exported functions is looked up; all the rest of its API is inline code over the tables of its objects. Symbols are
 * taken at the versions of 1.17's headers, which every later library keeps. What a provider can do is asked of fi_getinfo, never derived
 * from a version.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "core.h"

#define API_VERSION FI_VERSION(1, 17)
#define SHM_SCHEME "fi_ns://"
#define SHM_PREFIX "tandem-"

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static struct libfabric library;
static bool loaded;
static char library_path[256];
static bool ports_fixed; /* the providers have read their port range */
static uint16_t fixed_port_low, fixed_port_high;

/* POSIX promises that a pointer from dlsym holds a function; ISO C has no cast for it. */
static bool look_up(void *handle, const char *name, const char *version, void *function, size_t nbytes) {
  void *symbol = dlvsym(handle, name, version);
  if (symbol == NULL) return false;
  memcpy(function, &symbol, nbytes);
  return true;
}

static void *open_library(char *error, size_t error_nbytes) {
  const char *forced = getenv("TANDEM_LIBFABRIC");
  if (forced != NULL && forced[0] != '\0') {
    void *handle = dlopen(forced, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) snprintf(error, error_nbytes, "TANDEM_LIBFABRIC=%s cannot be loaded: %s", forced, dlerror());
    return handle;
  }
  void *handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD); /* the process may have one already: share it */
  if (handle != NULL) return handle;
  static const char *const places[] = {"/opt/amazon/efa/lib/libfabric.so.1", "/opt/amazon/efa/lib64/libfabric.so.1", "libfabric.so.1"};
  for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
    handle = dlopen(places[i], RTLD_NOW | RTLD_LOCAL);
    if (handle != NULL) return handle;
  }
  snprintf(error, error_nbytes, "libfabric is not installed (%s): install the package libfabric1, or set TANDEM_LIBFABRIC to its path",
           dlerror());
  return NULL;
}

static bool load(char *error, size_t error_nbytes) {
  void *handle = open_library(error, error_nbytes);
  if (handle == NULL) return false;
  Dl_info where;
  struct libfabric lib;
  bool complete = look_up(handle, "fi_version", "FABRIC_1.0", &lib.version, sizeof lib.version) &&
                  look_up(handle, "fi_strerror", "FABRIC_1.0", &lib.strerror, sizeof lib.strerror) &&
                  look_up(handle, "fi_fabric", "FABRIC_1.1", &lib.fabric, sizeof lib.fabric) &&
                  look_up(handle, "fi_getinfo", "FABRIC_1.3", &lib.getinfo, sizeof lib.getinfo) &&
                  look_up(handle, "fi_freeinfo", "FABRIC_1.3", &lib.freeinfo, sizeof lib.freeinfo) &&
                  look_up(handle, "fi_dupinfo", "FABRIC_1.3", &lib.dupinfo, sizeof lib.dupinfo);
  if (!complete) {
    snprintf(error, error_nbytes, "libfabric: %s; version 1.17 or later is needed", dlerror());
    dlclose(handle);
    return false;
  }
  void *symbol = dlsym(handle, "fi_version");
  snprintf(library_path, sizeof library_path, "%s", symbol != NULL && dladdr(symbol, &where) != 0 ? where.dli_fname : "libfabric.so.1");
  uint32_t version = lib.version();
  if (FI_VERSION_LT(version, FI_VERSION(1, 17))) {
    snprintf(error, error_nbytes, "libfabric %u.%u at %s is too old; version 1.17 or later is needed", FI_MAJOR(version),
             FI_MINOR(version), library_path);
    dlclose(handle);
    return false;
  }
  library = lib; /* never unloaded: its providers may have threads and exit handlers */
  return true;
}

const struct libfabric *libfabric_load(char *error, size_t error_nbytes) {
  pthread_mutex_lock(&load_lock);
  if (!loaded) loaded = load(error, error_nbytes);
  const struct libfabric *result = loaded ? &library : NULL;
  pthread_mutex_unlock(&load_lock);
  return result;
}

const struct libfabric *libfabric_loaded(void) {
  pthread_mutex_lock(&load_lock);
  const struct libfabric *result = loaded ? &library : NULL;
  pthread_mutex_unlock(&load_lock);
  return result;
}

/* net (1.17) and tcp (from 1.18) read their ranges from the environment when the library first lists its providers. */
static bool fix_ports(const tdm_config *config, char *error, size_t error_nbytes) {
  bool fits = true;
  pthread_mutex_lock(&load_lock);
  if (!ports_fixed) {
    if (config->port_high != 0) {
      char low[8], high[8];
      snprintf(low, sizeof low, "%u", config->port_low);
      snprintf(high, sizeof high, "%u", config->port_high);
      setenv("FI_NET_PORT_LOW_RANGE", low, 1);
      setenv("FI_NET_PORT_HIGH_RANGE", high, 1);
      setenv("FI_TCP_PORT_LOW_RANGE", low, 1);
      setenv("FI_TCP_PORT_HIGH_RANGE", high, 1);
    }
    setenv("FI_EFA_ENABLE_SHM_TRANSFER", "0", 0); /* its same-host path has crashed with device memory */
    fixed_port_low = config->port_low;
    fixed_port_high = config->port_high;
    ports_fixed = true;
  } else if (config->port_low != fixed_port_low || config->port_high != fixed_port_high) {
    snprintf(error, error_nbytes, "ports %u-%u: libfabric already uses %u-%u in this process, and reads its range only once",
             config->port_low, config->port_high, fixed_port_low, fixed_port_high);
    fits = false;
  }
  pthread_mutex_unlock(&load_lock);
  return fits;
}

/* The names under which libfabric may know a provider, the best first. */
static void spellings(const char *provider, const char *names[2]) {
  names[0] = provider;
  names[1] = NULL;
  if (strcmp(provider, "net") == 0) names[1] = "tcp"; /* renamed in 1.18 */
  if (strcmp(provider, "tcp") == 0) names[1] = "net"; /* 1.17's tcp has no RDM endpoint, and its tcp;ofi_rxm crashes in fi_close */
  if (strcmp(provider, "verbs") == 0) names[0] = "verbs;ofi_rxm";
}

static bool is_tcp(const char *name) { return strcmp(name, "net") == 0 || strcmp(name, "tcp") == 0; }

static int ask(const struct libfabric *lib, const tdm_config *config, const char *name, bool delivery_complete, struct fi_info **list) {
  struct fi_info *hints = lib->dupinfo(NULL);
  if (hints == NULL) return -FI_ENOMEM;
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  hints->domain_attr->threading = FI_THREAD_DOMAIN; /* one thread owns all of it */
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->name = config->domain != NULL ? strdup(config->domain) : NULL;
  hints->fabric_attr->prov_name = strdup(name);
  if (delivery_complete) hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
  bool by_address = config->bind_address != NULL && strcmp(name, "shm") != 0 && strcmp(name, "efa") != 0;
  int rc = lib->getinfo(API_VERSION, by_address ? config->bind_address : NULL, NULL, by_address ? FI_SOURCE | FI_NUMERICHOST : 0, hints,
                        list);
  lib->freeinfo(hints);
  return rc;
}

static const char *unfit(const struct fi_info *info, const char *name, bool one_endpoint) {
  if (strcmp(info->fabric_attr->prov_name, name) != 0) return "only layered under another provider";
  if (info->domain_attr->cq_data_size < 4) return "carries no 32-bit immediate";
  if ((info->domain_attr->mr_mode & FI_MR_ENDPOINT) && !one_endpoint) return "wants memory registered for each endpoint";
  return NULL;
}

struct fi_info *provider_find(const struct libfabric *lib, const tdm_config *config, struct traits *traits, char *error,
                              size_t error_nbytes) {
  uint32_t version = lib->version();
  if (config->provider == NULL || config->provider[0] == '\0') {
    snprintf(error, error_nbytes, "no provider named; allowed: net, tcp, shm, efa, verbs");
    return NULL;
  }
  if (!fix_ports(config, error, error_nbytes)) return NULL;
  bool efa = strcmp(config->provider, "efa") == 0;
  bool shm = strcmp(config->provider, "shm") == 0;
  bool one_endpoint = efa || config->one_endpoint;
  const char *names[2];
  spellings(config->provider, names);
  snprintf(error, error_nbytes, "%s: fi_getinfo: nothing fits (libfabric %u.%u at %s)", config->provider, FI_MAJOR(version),
           FI_MINOR(version), library_path);
  for (size_t i = 0; i < 2 && names[i] != NULL; i++) {
    /* Where it costs little, ask that a completion mean "delivered": failed writes then surface. On shm even that is no proof. */
    for (int delivery = !efa && !shm; delivery >= 0; delivery--) {
      struct fi_info *list = NULL;
      int rc = ask(lib, config, names[i], delivery != 0, &list);
      if (rc != 0) {
        const char *hint = efa                                         ? "is there an EFA NIC in this pod?"
                           : config->bind_address != NULL && is_tcp(names[i]) ? "is the bind address one of this host's?"
                                                                       : "is the provider built into this library?";
        snprintf(error, error_nbytes, "%s: fi_getinfo: %s (libfabric %u.%u at %s%s%s); %s", config->provider, lib->strerror(-rc),
                 FI_MAJOR(version), FI_MINOR(version), library_path, config->bind_address != NULL ? ", address " : "",
                 config->bind_address != NULL ? config->bind_address : "", hint);
        continue;
      }
      struct fi_info *chosen = NULL;
      for (struct fi_info *info = list; info != NULL && chosen == NULL; info = info->next) {
        const char *reason = unfit(info, names[i], one_endpoint);
        if (reason == NULL) {
          chosen = lib->dupinfo(info);
        } else {
          snprintf(error, error_nbytes, "%s: %s (libfabric %u.%u)", config->provider, reason, FI_MAJOR(version), FI_MINOR(version));
        }
      }
      lib->freeinfo(list);
      if (chosen == NULL) continue;
      int mr_mode = chosen->domain_attr->mr_mode;
      *traits = (struct traits){
          .shm = shm,
          .one_endpoint = one_endpoint,
          .fences_target = !one_endpoint,
          .fences_source = !one_endpoint && !shm, /* shm: the peer's poll reads our memory late, endpoint closed or not */
          .virtual_address = (mr_mode & FI_MR_VIRT_ADDR) != 0,
          .provider_keys = (mr_mode & FI_MR_PROV_KEY) != 0,
          .local_keys = (mr_mode & FI_MR_LOCAL) != 0,
          .endpoint_keys = (mr_mode & FI_MR_ENDPOINT) != 0,
          .delivery_complete = delivery != 0,
          .sticky_signal = is_tcp(names[i]) && FI_VERSION_LT(version, FI_VERSION(1, 19)),
      };
      return chosen;
    }
  }
  return NULL;
}

void signals_save(struct signals *signals) {
  for (int number = 1; number < SIGNALS; number++) sigaction(number, NULL, &signals->actions[number]);
}

void signals_restore(const struct signals *signals) {
  for (int number = 1; number < SIGNALS; number++) {
    if (number != SIGKILL && number != SIGSTOP) sigaction(number, &signals->actions[number], NULL);
  }
}

int tdm_probe(const tdm_config *config, char *text, size_t text_nbytes) {
  struct signals signals;
  struct traits traits;
  signals_save(&signals);
  const struct libfabric *lib = libfabric_load(text, text_nbytes);
  struct fi_info *info = lib != NULL ? provider_find(lib, config, &traits, text, text_nbytes) : NULL;
  signals_restore(&signals);
  if (info == NULL) return 0;
  uint32_t version = lib->version();
  snprintf(text, text_nbytes, "ok (libfabric %u.%u, provider %s, domain %s)", FI_MAJOR(version), FI_MINOR(version),
           info->fabric_attr->prov_name, info->domain_attr->name);
  lib->freeinfo(info);
  return 1;
}

const char *tdm_strerror(int code) {
  const struct libfabric *lib = libfabric_loaded();
  int positive = code < 0 ? -code : code;
  return lib != NULL && positive >= FI_ERRNO_OFFSET ? lib->strerror(positive) : strerror(positive);
}

uint64_t core_random(void) {
  uint64_t value;
  while (getrandom(&value, sizeof value, 0) != (ssize_t)sizeof value) {
  }
  return value;
}

/* --- shm's names ------------------------------------------------------------------------------------------------------------- */

/* Process ids mean something only inside their namespace: a file of a pod beside us must never look like a dead process's. */
static unsigned long long pid_namespace(void) {
  char target[64];
  ssize_t n = readlink("/proc/self/ns/pid", target, sizeof target - 1);
  unsigned long long inode = 0;
  if (n > 0) {
    target[n] = '\0';
    if (sscanf(target, "pid:[%llu]", &inode) != 1) inode = 0;
  }
  return inode;
}

unsigned long long process_start_time(long pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%ld/stat", pid);
  FILE *file = fopen(path, "re");
  if (file == NULL) return 0;
  size_t n = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[n] = '\0';
  char *field = strrchr(text, ')'); /* the name may hold blanks and parentheses */
  unsigned long long value = 0;
  for (int i = 2; field != NULL && i < 22; i++) field = strchr(field + 1, ' ');
  if (field != NULL && sscanf(field, " %llu", &value) != 1) value = 0;
  return value;
}

void provider_shm_name(char *name, size_t nbytes, uint32_t incarnation) {
  static atomic_uint number;
  snprintf(name, nbytes, SHM_SCHEME SHM_PREFIX "%llu-%ld-%llu-%" PRIu32 "-%016" PRIx64 "-%u", pid_namespace(), (long)getpid(),
           process_start_time(getpid()), incarnation, core_random(), atomic_fetch_add(&number, 1));
}

static void shm_paths(const char *address, char path[320], char kept[328]) {
  snprintf(path, 320, "/dev/shm/%s", address + strlen(SHM_SCHEME));
  snprintf(kept, 328, "%s.kept", path);
}

void provider_shm_keep(const char *address) {
  char path[320], kept[328];
  shm_paths(address, path, kept);
  (void)link(path, kept);
}

void provider_shm_kept(const char *address) {
  char path[320], kept[328];
  shm_paths(address, path, kept);
  (void)rename(kept, path);
}

void provider_sweep_shm(void) {
  DIR *folder = opendir("/dev/shm");
  if (folder == NULL) return;
  unsigned long long here = pid_namespace();
  for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
    unsigned long long namespace, started;
    long pid;
    if (sscanf(entry->d_name, SHM_PREFIX "%llu-%ld-%llu-", &namespace, &pid, &started) != 3) continue;
    if (namespace != here || pid <= 0 || process_start_time(pid) == started) continue;
    unlinkat(dirfd(folder), entry->d_name, 0);
  }
  closedir(folder);
}
