/* The progress thread: the only owner of libfabric's objects. Knows: the completion queue, when to sleep. Does not know: what completions mean
 * to transfers and links.
 *
 * A turn: the caller's commands, completions, the layer counter, frames, writes. With nothing done for `spin_us` the thread sleeps: in epoll on
 * the queue's descriptor where the provider has one, else (shm) for a growing time, short while transfers are live and 5 ms when idle. Commands, the layer counter's eventfd and ended processes wake it either way.
 */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core.h"

#define CQ_SIZE_MAX 32768
#define CQ_SIZE_MIN 1024
#define READ_BATCH 64
#define READS_PER_TURN 8
#define SLEEP_MIN_NS 20000ull
#define SLEEP_LIVE_NS 200000ull       /* no descriptor, transfers live */
#define SLEEP_EXPECTING_NS 1000000ull /* no descriptor, a counter is armed: a peer works for us */
#define SLEEP_IDLE_NS 5000000ull      /* no descriptor, idle: 0.4 % of a core, where 100 us cost 14 % */
#define SLEEP_COUNTER_NS 20000ull     /* a plan is pending and the layer counter has no eventfd */
#define SLEEP_LIVE_FD_NS 10000000ull  /* the descriptor wakes us; this only bounds a provider's forgetfulness */
#define SLEEP_IDLE_FD_NS 1000000000ull

/* --- opening and closing ----------------------------------------------------------------------------------------------------- */

static void close_queue(struct tdm_core *core) {
  if (core->cq != NULL) fi_close(&core->cq->fid);
  if (core->wait_set != NULL) fi_close(&core->wait_set->fid);
  core->cq = NULL;
  core->wait_set = NULL;
}

/* The queue, and the descriptor that turns readable when there is work on it; shm has none. */
static int open_queue_of(struct tdm_core *core, size_t size) {
  struct fi_cq_attr attr = {.size = size, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_FD};
  int rc;
  if (core->traits.sticky_signal) {
    struct fi_wait_attr wait_attr = {.wait_obj = FI_WAIT_FD};
    if ((rc = fi_wait_open(core->fabric, &wait_attr, &core->wait_set)) != 0) return rc;
    if ((rc = fi_control(&core->wait_set->fid, FI_GETWAIT, &core->cq_fd)) != 0) return rc;
    attr.wait_obj = FI_WAIT_SET;
    attr.wait_set = core->wait_set;
    return fi_cq_open(core->domain, &attr, &core->cq, NULL);
  }
  rc = fi_cq_open(core->domain, &attr, &core->cq, NULL);
  if (rc == 0) return fi_control(&core->cq->fid, FI_GETWAIT, &core->cq_fd);
  if (rc != -FI_ENOSYS) return rc;
  attr.wait_obj = FI_WAIT_NONE;
  return fi_cq_open(core->domain, &attr, &core->cq, NULL);
}

static int open_queue(struct tdm_core *core) {
  /* Everything that can be unfinished must fit, because EFA and verbs do not protect the queue. */
  int rc = -FI_EINVAL;
  for (size_t size = CQ_SIZE_MAX; size >= CQ_SIZE_MIN && rc != 0; size /= 2) {
    core->cq_size = size;
    core->cq_fd = -1;
    rc = open_queue_of(core, size);
    if (rc != 0) close_queue(core);
  }
  if (rc != 0) return rc;
  core->info.has_wait_fd = core->cq_fd >= 0;
  if (core->cq_fd >= 0) {
    struct epoll_event watch = {.events = EPOLLIN, .data.fd = core->cq_fd};
    if (epoll_ctl(core->epoll_fd, EPOLL_CTL_ADD, core->cq_fd, &watch) != 0) return -errno;
  }
  struct epoll_event watch = {.events = EPOLLIN, .data.fd = core->command_fd};
  return epoll_ctl(core->epoll_fd, EPOLL_CTL_ADD, core->command_fd, &watch) == 0 ? 0 : -errno;
}

static bool open_all(struct tdm_core *core) {
  const char *call = "fi_fabric";
  int rc = core->lib->fabric(core->fi->fabric_attr, &core->fabric, NULL);
  if (rc == 0) {
    call = "fi_domain";
    rc = fi_domain(core->fabric, core->fi, &core->domain, NULL);
  }
  if (rc == 0) {
    call = "fi_cq_open";
    rc = open_queue(core);
  }
  if (rc != 0) {
    snprintf(core->error, sizeof core->error, "%s: %s: %s", core->info.provider, call, tdm_strerror(rc));
    return false;
  }
  rc = endpoint_open(core, NULL, &core->bootstrap, core->error, sizeof core->error);
  if (rc == 0) core->info.tx_window = core->bootstrap->window;
  return rc == 0;
}

static void close_all(struct tdm_core *core) {
  transfer_free(core);
  link_close_all(core);
  bool keep = core->traits.shm && core->bootstrap != NULL && bootstrap_unreached(core);
  const char *name = keep ? (const char *)core->bootstrap->address : NULL;
  bootstrap_free(core);
  if (core->traits.endpoint_keys) memory_free(core); /* bound to the endpoint, so they go first */
  if (core->bootstrap != NULL) {
    if (keep) provider_shm_keep(name);
    endpoint_close(core, core->bootstrap);
    if (keep) provider_shm_kept(name);
    endpoint_free(core->bootstrap);
  }
  memory_free(core);
  close_queue(core);
  if (core->domain != NULL) fi_close(&core->domain->fid);
  if (core->fabric != NULL) fi_close(&core->fabric->fid);
}

/* --- a turn ------------------------------------------------------------------------------------------------------------------ */

static size_t run_commands(struct tdm_core *core) {
  size_t worked = 0;
  for (;; worked++) {
    pthread_mutex_lock(&core->lock);
    struct command *command = core->commands;
    if (command != NULL) {
      core->commands = command->next;
      if (core->commands == NULL) core->commands_tail = &core->commands;
    }
    pthread_mutex_unlock(&core->lock);
    if (command == NULL) return worked;
    switch (command->kind) {
      case COMMAND_REGISTER: memory_command(core, command); break;
      case COMMAND_BOOTSTRAP: bootstrap_command(core, command); break;
      default: link_command(core, command); break;
    }
    if (!command->waited) {
      free(command);
      continue;
    }
    pthread_mutex_lock(&core->lock);
    command->done = true;
    pthread_cond_broadcast(&core->answered);
    pthread_mutex_unlock(&core->lock);
  }
}

static void fatal(struct tdm_core *core, int code, const char *call) {
  char text[128];
  snprintf(text, sizeof text, "%s: %s: %s", core->info.provider, call, tdm_strerror(code));
  pthread_mutex_lock(&core->lock);
  if (!core->fatal) core_event(core, &(tdm_event){.type = TDM_EV_FATAL, .code = code}, text, strlen(text));
  core->fatal = true;
  pthread_mutex_unlock(&core->lock);
}

static void completed(struct tdm_core *core, const struct fi_cq_data_entry *entry) {
  if ((entry->flags & FI_REMOTE_CQ_DATA) && !(entry->flags & (FI_RECV | FI_SEND))) { /* a write of a peer; its context means nothing */
    pthread_mutex_lock(&core->lock);
    counters_immediate(core, (uint32_t)entry->data);
    pthread_mutex_unlock(&core->lock);
    return;
  }
  struct op *op = entry->op_context;
  if (op == NULL) return;
  switch (op->kind) {
    case OP_RECEIVE:
      op->nbytes = entry->len;
      op->has_link = (entry->flags & FI_REMOTE_CQ_DATA) != 0;
      op->link_id = (uint32_t)entry->data;
      endpoint_received(core, op);
      break;
    case OP_SEND: endpoint_send_done(op); break;
    case OP_WRITE:
      pthread_mutex_lock(&core->lock);
      transfer_write_done(core, op, 0);
      pthread_mutex_unlock(&core->lock);
      break;
  }
}

/* Returns false when the queue itself is broken. */
static bool read_error(struct tdm_core *core) {
  struct fi_cq_err_entry error = {0};
  ssize_t rc = fi_cq_readerr(core->cq, &error, 0);
  if (rc == -FI_EAGAIN) return true;
  if (rc < 0) {
    fatal(core, (int)rc, "fi_cq_readerr");
    return false;
  }
  pthread_mutex_lock(&core->lock);
  core->stats.cq_errors++;
  pthread_mutex_unlock(&core->lock);
  if (error.flags & (FI_REMOTE_WRITE | FI_REMOTE_READ)) return true; /* a peer's write broke off; net leaves garbage as its context */
  struct op *op = error.op_context;
  if (op == NULL) return true;
  switch (op->kind) {
    case OP_RECEIVE: endpoint_repost(core, op); break; /* too long, or its endpoint is gone: then it is not taken back */
    case OP_SEND: endpoint_send_done(op); break;
    case OP_WRITE:
      pthread_mutex_lock(&core->lock);
      transfer_write_done(core, op, error.err != 0 ? error.err : FI_EIO);
      pthread_mutex_unlock(&core->lock);
      break;
  }
  return true;
}

/* `*dry`: the queue was seen empty. */
static size_t read_completions(struct tdm_core *core, bool *dry) {
  struct fi_cq_data_entry entries[READ_BATCH];
  size_t worked = 0;
  *dry = false;
  for (int i = 0; i < READS_PER_TURN && !core->fatal; i++) {
    ssize_t n = fi_cq_read(core->cq, entries, READ_BATCH);
    if (n == -FI_EAGAIN || n == 0) {
      *dry = true;
      break;
    }
    if (n == -FI_EAVAIL) {
      if (!read_error(core)) break;
      worked++;
      continue;
    }
    if (n < 0) {
      fatal(core, (int)n, "fi_cq_read");
      break;
    }
    for (ssize_t k = 0; k < n; k++) completed(core, &entries[k]);
    worked += (size_t)n;
  }
  return worked;
}

/* --- sleeping ---------------------------------------------------------------------------------------------------------------- */

static void process_gone(struct tdm_core *core, int pidfd) {
  pthread_mutex_lock(&core->lock);
  for (struct process **at = &core->processes; *at != NULL; at = &(*at)->next) {
    struct process *process = *at;
    if (process->pidfd != pidfd) continue;
    *at = process->next;
    core_event(core, &(tdm_event){.type = TDM_EV_PROCESS_GONE, .link = process->link}, NULL, 0);
    close(pidfd); /* leaves epoll by that */
    free(process);
    break;
  }
  pthread_mutex_unlock(&core->lock);
}

/* The layer counter's writer signals every layer: listened to only while a plan waits for one. */
static void arm_layer_fd(struct tdm_core *core, bool wanted) {
  if (core->layer_fd < 0 || core->layer_fd_armed == wanted) return;
  struct epoll_event watch = {.events = wanted ? EPOLLIN : 0, .data.fd = core->layer_fd};
  epoll_ctl(core->epoll_fd, EPOLL_CTL_MOD, core->layer_fd, &watch);
  core->layer_fd_armed = wanted;
}

static void handle(struct tdm_core *core, const struct epoll_event *events, int n) {
  for (int i = 0; i < n; i++) {
    int fd = events[i].data.fd;
    eventfd_t ignored;
    if (fd == core->cq_fd) continue;
    if (fd == core->command_fd || fd == core->layer_fd) {
      eventfd_read(fd, &ignored); /* cleared before the command or the counter is read: nothing is missed */
    } else {
      process_gone(core, fd);
    }
  }
}

static int wait_events(struct tdm_core *core, struct epoll_event *events, int capacity, uint64_t timeout_ns) {
  struct timespec timeout = {.tv_sec = (time_t)(timeout_ns / 1000000000ull), .tv_nsec = (long)(timeout_ns % 1000000000ull)};
#ifdef SYS_epoll_pwait2
  int n = (int)syscall(SYS_epoll_pwait2, core->epoll_fd, events, capacity, &timeout, NULL, 0);
  if (n >= 0 || errno != ENOSYS) return n;
#endif
  return epoll_wait(core->epoll_fd, events, capacity, (int)((timeout_ns + 999999ull) / 1000000ull)); /* Linux before 5.11 */
}

/* Whether the queue's descriptor may be waited on: nothing has come since it was last read. */
static bool may_wait(struct tdm_core *core) {
  if (core->wait_set != NULL) {
    fi_wait(core->wait_set, 0); /* clears the signal; all that has come since is found by the read below */
    bool dry;
    return read_completions(core, &dry) == 0;
  }
  struct fid *fids[1] = {&core->cq->fid};
  return core->cq_fd < 0 || fi_trywait(core->fabric, fids, 1) == 0;
}

static void rest(struct tdm_core *core, uint64_t *idle_since_ns) {
  struct epoll_event events[16];
  uint64_t now = tdm_now_ns();
  if (*idle_since_ns == 0) *idle_since_ns = now;
  uint64_t idle_ns = now - *idle_since_ns;

  pthread_mutex_lock(&core->lock);
  bool plans = core->plans != NULL;
  bool live = core->writes_unfinished > 0 || core->counters_receiving > 0 || link_frames_waiting(core) || transfer_has_work(core);
  bool expecting = core->counters_waiting > 0;
  bool polled_counter = plans && core->layer_fd < 0;
  pthread_mutex_unlock(&core->lock);
  if (idle_ns < core->spin_us * 1000ull) { /* what has just moved tends to move again */
    sched_yield();
    return;
  }
  arm_layer_fd(core, plans);
  if (!may_wait(core)) {
    sched_yield();
    return;
  }
  uint64_t timeout_ns;
  if (core->cq_fd >= 0) {
    timeout_ns = live ? SLEEP_LIVE_FD_NS : SLEEP_IDLE_FD_NS;
  } else {
    uint64_t most = live ? SLEEP_LIVE_NS : expecting ? SLEEP_EXPECTING_NS : SLEEP_IDLE_NS;
    timeout_ns = idle_ns / 4; /* never late by more than a quarter of the silence */
    if (timeout_ns < SLEEP_MIN_NS) timeout_ns = SLEEP_MIN_NS;
    if (timeout_ns > most) timeout_ns = most;
  }
  if (polled_counter && timeout_ns > SLEEP_COUNTER_NS) timeout_ns = SLEEP_COUNTER_NS;

  pthread_mutex_lock(&core->lock);
  /* What came since the turn began was queued before `sleeping` was set, so its caller did not wake us. */
  bool sleeping = core->commands == NULL && !core->stopping && core->generation == core->seen_generation;
  core->sleeping = sleeping;
  core->stats.sleeps += sleeping;
  pthread_mutex_unlock(&core->lock);
  if (!sleeping) return;
  int n = wait_events(core, events, sizeof events / sizeof *events, timeout_ns);
  pthread_mutex_lock(&core->lock);
  core->sleeping = false;
  pthread_mutex_unlock(&core->lock);
  handle(core, events, n);
}

void *progress_run(void *argument) {
  struct tdm_core *core = argument;
  pthread_setname_np(pthread_self(), core->name);
  bool opened = true;
  if (core->cpus != NULL) {
    int rc = pthread_setaffinity_np(pthread_self(), core->cpus_nbytes, core->cpus);
    if (rc != 0) {
      snprintf(core->error, sizeof core->error, "%s: pthread_setaffinity_np: %s; are the CPUs among those of this process?",
               core->info.provider, strerror(rc));
      opened = false;
    }
  }
  opened = opened && open_all(core);
  pthread_mutex_lock(&core->lock);
  core->opened = opened;
  core->failed = !opened;
  pthread_cond_broadcast(&core->answered);
  pthread_mutex_unlock(&core->lock);

  uint64_t idle_since_ns = 0;
  while (opened && !core->stopping) {
    bool dry;
    pthread_mutex_lock(&core->lock);
    core->seen_generation = core->generation;
    pthread_mutex_unlock(&core->lock);
    size_t worked = run_commands(core);
    size_t n_read = read_completions(core, &dry);
    worked += n_read + link_finish_closing(core, dry, n_read) + endpoint_unpark(core) + plan_watch(core) + endpoint_send_frames(core) +
              transfer_post(core);
    if (worked > 0) {
      idle_since_ns = 0;
    } else {
      rest(core, &idle_since_ns);
    }
  }
  close_all(core);
  return NULL;
}
