/* Regions: memory received as a file descriptor, mapped, registered, and granted to peers. Knows: keys. Does not know: pages.
 *
 * A region is registered once for the core, for our own writes out of it, and once more for each link, with a key that dies with the link. On
 * net, tcp and shm a registration is an entry in a table; with a NIC it is work, but links come and go rarely.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "core.h"

int memory_register(struct tdm_core *core, const struct region *region, uint64_t access, struct fid_mr **mr, uint64_t *key) {
  uint64_t wanted = 0;
  if (!core->traits.provider_keys) {
    wanted = core_random();
    size_t key_nbytes = core->fi->domain_attr->mr_key_size;
    if (key_nbytes < sizeof wanted) wanted &= (1ull << 8 * key_nbytes) - 1;
  }
  int rc = fi_mr_reg(core->domain, region->memory, region->nbytes, access, 0, wanted, 0, mr, NULL);
  if (rc != 0) return rc;
  if (core->traits.endpoint_keys) { /* only where one endpoint serves all */
    rc = fi_mr_bind(*mr, &core->bootstrap->ep->fid, 0);
    if (rc == 0) rc = fi_mr_enable(*mr);
    if (rc != 0) {
      fi_close(&(*mr)->fid);
      *mr = NULL;
      return rc;
    }
  }
  *key = fi_mr_key(*mr);
  return 0;
}

void memory_command(struct tdm_core *core, struct command *command) {
  struct region *region = &core->regions[command->region];
  struct fid_mr *mr = NULL;
  uint64_t key = 0;
  int rc = memory_register(core, region, core->traits.one_endpoint ? FI_WRITE | FI_REMOTE_WRITE : FI_WRITE, &mr, &key);
  pthread_mutex_lock(&core->lock);
  command->result = rc;
  if (rc == 0) {
    region->mr = mr;
    region->desc = core->traits.local_keys ? fi_mr_desc(mr) : NULL;
    region->key = key;
    region->base = core->traits.virtual_address ? (uint64_t)(uintptr_t)region->memory : 0;
  }
  pthread_mutex_unlock(&core->lock);
}

int memory_grant(struct tdm_core *core, struct link *link) {
  for (size_t i = 0; i < REGIONS_MAX; i++) {
    struct region *region = &core->regions[i];
    struct grant *grant = &link->grants[i];
    if (region->mr == NULL) continue;
    grant->remote = (tdm_remote_region){.key = region->key, .base = region->base, .nbytes = region->nbytes};
    if (core->traits.one_endpoint) continue;
    int rc = memory_register(core, region, FI_REMOTE_WRITE, &grant->mr, &grant->remote.key);
    if (rc != 0) return rc;
  }
  return 0;
}

void memory_revoke(struct link *link) {
  for (size_t i = 0; i < REGIONS_MAX; i++) {
    if (link->grants[i].mr != NULL) fi_close(&link->grants[i].mr->fid);
    link->grants[i].mr = NULL;
  }
}

void memory_free(struct tdm_core *core) {
  for (size_t i = 0; i < REGIONS_MAX; i++) {
    struct region *region = &core->regions[i];
    if (region->mr != NULL) fi_close(&region->mr->fid);
    if (region->memory != NULL) munmap(region->memory, region->nbytes);
    *region = (struct region){0};
  }
}

int tdm_register_fd(tdm_core *core, uint32_t region_id, int fd, size_t nbytes, uint64_t *key, uint64_t *base) {
  if (region_id >= REGIONS_MAX || nbytes == 0) return -EINVAL;
  struct region *region = &core->regions[region_id];
  core_lock(core);
  bool taken = region->memory != NULL;
  core_unlock(core);
  if (taken) return -EEXIST;
  void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return -errno;
  struct command command = {.kind = COMMAND_REGISTER, .region = region_id, .waited = true};
  core_lock(core);
  region->memory = memory;
  region->nbytes = nbytes;
  core_command(core, &command);
  while (!command.done) pthread_cond_wait(&core->answered, &core->lock);
  if (command.result == 0) {
    *key = region->key;
    *base = region->base;
  } else {
    region->memory = NULL;
  }
  core_unlock(core);
  if (command.result != 0) munmap(memory, nbytes);
  return command.result;
}

void *tdm_region_memory(tdm_core *core, uint32_t region) {
  if (region >= REGIONS_MAX) return NULL;
  core_lock(core);
  void *memory = core->regions[region].mr != NULL ? core->regions[region].memory : NULL;
  core_unlock(core);
  return memory;
}
