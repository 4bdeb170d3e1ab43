/* The caller's end of the core: opening, events, statistics, what to watch. Knows: the lock, queues, file descriptors. Does not know: libfabric's
 * objects, which belong to the progress thread.
 *
 * Events are a queue and an eventfd. Frames in it are bounded per link (the receiver parks the rest); the other events are bounded by what the
 * caller itself started, and are never dropped.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core.h"

uint64_t tdm_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

void core_lock(struct tdm_core *core) {
  atomic_fetch_add_explicit(&core->callers, 1, memory_order_relaxed);
  pthread_mutex_lock(&core->lock);
  atomic_fetch_sub_explicit(&core->callers, 1, memory_order_relaxed);
}

void core_unlock(struct tdm_core *core) { pthread_mutex_unlock(&core->lock); }

void core_wake(struct tdm_core *core) {
  core->generation++;
  if (!core->sleeping) return;
  core->sleeping = false;
  core->stats.wakeups++;
  eventfd_write(core->command_fd, 1);
}

void core_command(struct tdm_core *core, struct command *command) {
  command->next = NULL;
  *core->commands_tail = command;
  core->commands_tail = &command->next;
  core_wake(core);
}

void core_event(struct tdm_core *core, const tdm_event *body, const void *data, size_t nbytes) {
  struct event *event = malloc(sizeof *event + nbytes);
  if (event == NULL) abort(); /* a lost completion would leave pages pinned for ever, or free them too early */
  event->next = NULL;
  event->body = *body;
  event->body.time_ns = tdm_now_ns();
  event->body.data_nbytes = nbytes;
  if (nbytes > 0) memcpy(event->data, data, nbytes);
  if (core->events == NULL) eventfd_write(core->event_fd, 1);
  *core->events_tail = event;
  core->events_tail = &event->next;
}

int tdm_event_fd(tdm_core *core) { return core->event_fd; }

int tdm_next_event(tdm_core *core, tdm_event *out, uint8_t *data, size_t capacity) {
  core_lock(core);
  struct event *event = core->events;
  if (event != NULL) {
    core->events = event->next;
    if (core->events == NULL) {
      eventfd_t ignored;
      core->events_tail = &core->events;
      eventfd_read(core->event_fd, &ignored);
    }
    if (event->body.type == TDM_EV_OUT_DRAINED) transfer_forget(core, event->body.transfer);
    if (event->body.type == TDM_EV_BOOTSTRAP) core->bootstrap_event_frames--;
    if (event->body.type == TDM_EV_FRAME) {
      struct link *link = link_find(core, event->body.link);
      if (link != NULL) link->event_frames--;
    }
  }
  core_unlock(core);
  if (event == NULL) return 0;
  *out = event->body;
  size_t nbytes = event->body.data_nbytes < capacity ? event->body.data_nbytes : capacity;
  out->data_nbytes = nbytes;
  if (nbytes > 0) memcpy(data, event->data, nbytes);
  free(event);
  return 1;
}

/* --- opening and closing ----------------------------------------------------------------------------------------------------- */

static void describe(struct tdm_core *core) {
  const struct fi_info *fi = core->fi;
  uint32_t version = core->lib->version();
  tdm_info *info = &core->info;
  snprintf(info->provider, sizeof info->provider, "%s", fi->fabric_attr->prov_name);
  snprintf(info->fabric, sizeof info->fabric, "%s", fi->fabric_attr->name != NULL ? fi->fabric_attr->name : "");
  snprintf(info->domain, sizeof info->domain, "%s", fi->domain_attr->name != NULL ? fi->domain_attr->name : "");
  snprintf(info->version, sizeof info->version, "%u.%u", FI_MAJOR(version), FI_MINOR(version));
  info->virtual_address = core->traits.virtual_address;
  info->provider_keys = core->traits.provider_keys;
  info->delivery_complete = core->traits.delivery_complete;
  info->immediate_nbytes = fi->domain_attr->cq_data_size < 8 ? (int)fi->domain_attr->cq_data_size : 8;
  info->one_endpoint = core->traits.one_endpoint;
  info->close_fences_target = core->traits.fences_target;
  info->close_fences_source = core->traits.fences_source;
  info->max_message = info->max_write = fi->ep_attr->max_msg_size;
}

static void free_core(struct tdm_core *core) {
  while (core->events != NULL) {
    struct event *event = core->events;
    core->events = event->next;
    free(event);
  }
  while (core->processes != NULL) {
    struct process *process = core->processes;
    core->processes = process->next;
    close(process->pidfd);
    free(process);
  }
  if (core->layer_word != NULL) munmap((void *)(uintptr_t)core->layer_word, sizeof(uint64_t));
  if (core->layer_fd >= 0) close(core->layer_fd);
  if (core->epoll_fd >= 0) close(core->epoll_fd);
  if (core->command_fd >= 0) close(core->command_fd);
  if (core->event_fd >= 0) close(core->event_fd);
  if (core->fi != NULL) core->lib->freeinfo(core->fi);
  if (core->cpus != NULL) CPU_FREE(core->cpus);
  pthread_mutex_destroy(&core->lock);
  pthread_cond_destroy(&core->answered);
  free(core->transfers);
  free(core->counters);
  free(core);
}

static bool set_cpus(struct tdm_core *core, const tdm_config *config) {
  if (config->cpus == NULL || config->n_cpus == 0) return true;
  int highest = 0;
  for (size_t i = 0; i < config->n_cpus; i++) {
    if (config->cpus[i] < 0) return false;
    if (config->cpus[i] > highest) highest = config->cpus[i];
  }
  core->cpus = CPU_ALLOC(highest + 1);
  core->cpus_nbytes = CPU_ALLOC_SIZE(highest + 1);
  if (core->cpus == NULL) return false;
  CPU_ZERO_S(core->cpus_nbytes, core->cpus);
  for (size_t i = 0; i < config->n_cpus; i++) CPU_SET_S(config->cpus[i], core->cpus_nbytes, core->cpus);
  return true;
}

static tdm_core *open_core(const tdm_config *config, char *error, size_t error_nbytes) {
  const struct libfabric *lib = libfabric_load(error, error_nbytes);
  struct tdm_core *core = lib != NULL ? calloc(1, sizeof *core) : NULL;
  if (core == NULL) return NULL;
  core->lib = lib;
  core->layer_fd = core->cq_fd = -1;
  core->commands_tail = &core->commands;
  core->events_tail = &core->events;
  pthread_mutex_init(&core->lock, NULL);
  pthread_cond_init(&core->answered, NULL);
  core->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  core->command_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  core->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  core->transfers = calloc(TRANSFER_BUCKETS, sizeof(struct transfer *));
  core->counters = calloc(TDM_SLOTS, sizeof(struct counter));
  core->node_id = config->node_id;
  core->incarnation = config->incarnation;
  core->spin_us = config->spin_us;
  snprintf(core->name, sizeof core->name, "%s", config->name != NULL ? config->name : "tandem");
  if (core->epoll_fd < 0 || core->command_fd < 0 || core->event_fd < 0 || core->transfers == NULL || core->counters == NULL ||
      !set_cpus(core, config)) {
    snprintf(error, error_nbytes, "%s: cannot set up: %s", config->provider, strerror(errno));
    free_core(core);
    return NULL;
  }
  core->fi = provider_find(lib, config, &core->traits, error, error_nbytes);
  if (core->fi == NULL) {
    free_core(core);
    return NULL;
  }
  describe(core);
  if (core->traits.shm) provider_sweep_shm();
  int rc = pthread_create(&core->thread, NULL, progress_run, core);
  if (rc != 0) {
    snprintf(error, error_nbytes, "%s: pthread_create: %s", config->provider, strerror(rc));
    free_core(core);
    return NULL;
  }
  pthread_mutex_lock(&core->lock);
  while (!core->opened && !core->failed) pthread_cond_wait(&core->answered, &core->lock);
  bool failed = core->failed;
  pthread_mutex_unlock(&core->lock);
  if (failed) {
    pthread_join(core->thread, NULL);
    snprintf(error, error_nbytes, "%s", core->error);
    free_core(core);
    return NULL;
  }
  return core;
}

tdm_core *tdm_open(const tdm_config *config, char *error, size_t error_nbytes) {
  struct signals signals;
  signals_save(&signals);
  tdm_core *core = open_core(config, error, error_nbytes);
  signals_restore(&signals);
  return core;
}

void tdm_close(tdm_core *core) {
  core_lock(core);
  core->stopping = true;
  core_wake(core);
  core_unlock(core);
  pthread_join(core->thread, NULL);
  free_core(core);
}

void tdm_get_info(tdm_core *core, tdm_info *info) { *info = core->info; }

void tdm_get_stats(tdm_core *core, tdm_stats *stats) {
  clockid_t clock;
  struct timespec used = {0};
  core_lock(core);
  *stats = core->stats;
  core_unlock(core);
  if (pthread_getcpuclockid(core->thread, &clock) == 0) clock_gettime(clock, &used);
  stats->thread_cpu_ns = (uint64_t)used.tv_sec * 1000000000ull + (uint64_t)used.tv_nsec;
}

/* --- what the thread watches for the caller ---------------------------------------------------------------------------------- */

void tdm_store_release(uint64_t *word, uint64_t value) { atomic_store_explicit((_Atomic uint64_t *)word, value, memory_order_release); }

int tdm_watch_counter(tdm_core *core, int memfd, int eventfd) {
  void *word = mmap(NULL, sizeof(uint64_t), PROT_READ, MAP_SHARED, memfd, 0);
  if (word == MAP_FAILED) return -errno;
  int fd = eventfd >= 0 ? dup(eventfd) : -1;
  if (eventfd >= 0 && fd < 0) {
    int rc = -errno;
    munmap(word, sizeof(uint64_t));
    return rc;
  }
  core_lock(core);
  int rc = core->layer_word != NULL ? -EEXIST : 0;
  if (rc == 0 && fd >= 0) {
    struct epoll_event watch = {.events = 0, .data.fd = fd}; /* armed while a plan is pending */
    if (epoll_ctl(core->epoll_fd, EPOLL_CTL_ADD, fd, &watch) != 0) rc = -errno;
  }
  if (rc == 0) {
    core->layer_fd = fd;
    core->layer_word = word;
  }
  core_unlock(core);
  if (rc != 0) {
    munmap(word, sizeof(uint64_t));
    if (fd >= 0) close(fd);
  }
  return rc;
}

int tdm_watch_process(tdm_core *core, uint32_t link, int pid, uint64_t start_time) {
  int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
  if (pidfd < 0) return -errno;
  /* The id may have been given to a later process before the descriptor was opened; from here on it cannot be. */
  unsigned long long started = process_start_time(pid);
  struct pollfd ended = {.fd = pidfd, .events = POLLIN}; /* a zombie still has its id, and no memory */
  if (poll(&ended, 1, 0) > 0) started = 0;
  struct process *process = started == start_time ? malloc(sizeof *process) : NULL;
  if (process == NULL) {
    close(pidfd);
    return started == start_time ? -ENOMEM : -ESRCH;
  }
  *process = (struct process){.link = link, .pidfd = pidfd};
  core_lock(core);
  struct epoll_event watch = {.events = EPOLLIN, .data.fd = pidfd};
  int rc = epoll_ctl(core->epoll_fd, EPOLL_CTL_ADD, pidfd, &watch) == 0 ? 0 : -errno;
  if (rc == 0) {
    process->next = core->processes;
    core->processes = process;
  }
  core_unlock(core);
  if (rc != 0) {
    close(pidfd);
    free(process);
  }
  return rc;
}
