/* What the files of the core share.
 *
 * Two threads meet here: the caller's and the progress thread. `core->lock` guards everything below it in `struct tdm_core` and all that hangs
 * there (links, transfers, runs, plans, counters, events). libfabric objects belong to the progress thread alone; it calls into libfabric with
 * the lock held only to post, one operation at a time: that is what makes a stop take effect when it returns.
 */
#ifndef TANDEM_CORE_H
#define TANDEM_CORE_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "tandem_fabric.h"

#define RECEIVES_PER_ENDPOINT 32
#define SENDS_PER_ENDPOINT 16
#define FRAME_QUEUE_MAX 1024       /* frames waiting on one link, or on the bootstrap endpoint */
#define EVENT_FRAMES_MAX 512       /* frames of one link waiting for the caller; beyond it they wait in the provider, so that peer waits */
#define REGIONS_MAX 64
#define BOOTSTRAP_PEERS_MAX 128    /* shm has room for 256 peers of an endpoint */
#define BOOTSTRAP_PATIENCE_NS 2000000000ull /* a bootstrap frame that could not be posted for so long is dropped */
#define WINDOW_RESERVE 64          /* of the transmit queue, left to frames */
#define WINDOW_NBYTES (32u << 20)  /* unfinished writes of a link: more would only delay its frames and its cancels */

/* --- provider.c -------------------------------------------------------------------------------------------------------------- */

struct libfabric {
  uint32_t (*version)(void);
  int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                 struct fi_info **info);
  void (*freeinfo)(struct fi_info *info);
  struct fi_info *(*dupinfo)(const struct fi_info *info);
  int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
  const char *(*strerror)(int code);
};

/* What differs between providers, decided once from what fi_getinfo answered. */
struct traits {
  bool shm;             /* endpoint names are files in /dev/shm */
  bool one_endpoint;    /* EFA: a queue pair for each peer would waste the device */
  bool fences_target, fences_source;
  bool virtual_address, provider_keys, local_keys, endpoint_keys;
  bool delivery_complete;
  bool sticky_signal;   /* net and tcp before 1.19: fi_trywait does not clear the queue's descriptor, a wait set does */
};

const struct libfabric *libfabric_load(char *error, size_t error_nbytes);
const struct libfabric *libfabric_loaded(void); /* NULL before */
/* The first info that fits the configuration; NULL with `error` filled. */
struct fi_info *provider_find(const struct libfabric *lib, const tdm_config *config, struct traits *traits, char *error,
                              size_t error_nbytes);
/* Removes the files in /dev/shm that dead processes of ours left behind. */
void provider_sweep_shm(void);
/* A name no other endpoint has had: pid, start time, incarnation, random, number. */
void provider_shm_name(char *name, size_t nbytes, uint32_t incarnation);
/* Around the close of an endpoint: its file outlives it (see bootstrap_unreached). */
void provider_shm_keep(const char *address);
void provider_shm_kept(const char *address);
/* Field 22 of /proc/PID/stat: tells a process from a later one with its id. 0: there is none. */
unsigned long long process_start_time(long pid);

/* Loading libfabric and opening its first endpoint replaces signal handlers of the process: psm2 takes SIGINT, SIGTERM and the fatal ones for its
 * backtraces as soon as it is loaded, shm takes them to unlink its files, which would cut a worker off in the midst of its drain (stale
 * files are swept at the next start instead). Whoever opens the fabric saves the handlers before and restores them after. */
#define SIGNALS 32
struct signals {
  struct sigaction actions[SIGNALS];
};
void signals_save(struct signals *signals);
void signals_restore(const struct signals *signals);

/* --- endpoint.c -------------------------------------------------------------------------------------------------------------- */

enum op_kind { OP_RECEIVE, OP_SEND, OP_WRITE };

struct endpoint;
struct link;
struct transfer;

/* One posted operation. libfabric hands its address back, so it must outlive the completion. */
struct op {
  struct fi_context2 context; /* first: the provider's scratch space */
  enum op_kind kind;
  struct endpoint *endpoint;
  struct op *next;            /* free list */
  uint8_t *buffer;            /* frames */
  struct bootstrap_peer *bootstrap_peer;
  bool has_link;              /* receives: what came with a frame that is parked */
  uint32_t link_id;
  struct transfer *transfer;  /* writes */
  uint64_t nbytes;
};

struct endpoint {
  struct endpoint *next;      /* core->endpoints */
  struct fid_ep *ep;
  struct fid_av *av;
  struct fid_mr *buffers_mr;  /* NULL unless the provider wants local keys */
  void *buffers_desc;
  uint8_t *buffers;
  struct link *link;          /* NULL: bootstrap, or shared */
  struct op receives[RECEIVES_PER_ENDPOINT], sends[SENDS_PER_ENDPOINT];
  struct op *writes;          /* window entries */
  struct op *free_sends, *free_writes;
  struct op *parked, **parked_tail; /* receives whose frame waits for room among the events, in order */
  struct op *unposted;        /* receives that the provider would not take back yet */
  size_t window, n_writes;
  uint64_t write_nbytes;      /* unfinished */
  uint8_t address[TDM_ADDRESS_MAX];
  size_t address_nbytes;
};

struct frame {
  struct frame *next;
  struct bootstrap_peer *peer;
  uint64_t queued_ns;
  size_t nbytes;
  uint8_t data[];
};

struct frame_queue {
  struct frame *head, *tail;
  size_t length;
};

enum link_state { LINK_OPENING, LINK_OPEN, LINK_CONNECTED, LINK_FAILED, LINK_CLOSING, LINK_SHUT };

struct grant {
  struct fid_mr *mr;          /* NULL: the region's own */
  tdm_remote_region remote;
};

struct link {
  uint32_t id;
  enum link_state state;
  struct link *next;
  struct endpoint *endpoint;
  bool connect_asked;         /* frames and transfers may be queued */
  fi_addr_t peer;
  uint32_t peer_link;         /* shared endpoint: the peer's link id, sent with every frame */
  uint8_t key[TDM_KEY_NBYTES];
  uint8_t direction_out, direction_in;
  struct grant grants[REGIONS_MAX];
  tdm_remote_region *remote;
  size_t n_remote;
  struct frame_queue frames;
  struct transfer *transfers;
  struct run **heap;          /* postable runs, the most urgent first */
  size_t heap_length, heap_capacity, n_runs;
  uint64_t n_writes;          /* unfinished */
  uint64_t last_heard_ns, rtt_ns;
  uint8_t *pong;              /* what the caller published for this peer last */
  size_t pong_nbytes;
  uint64_t pong_ns;
  uint64_t shut_reads;        /* completions read since the endpoint was closed */
  size_t event_frames;        /* its frames among the events */
};

/* --- transfer.c, run.c, plan.c ----------------------------------------------------------------------------------------------- */

struct plan;

/* Some pages of one transfer, in all its layers: `ready` layers may be posted, `layer` is the next to post. */
struct run {
  struct transfer *transfer;
  struct plan *plan;          /* NULL: valid in every layer */
  struct run *transfer_next, *transfer_previous, *plan_next, *plan_previous;
  size_t heap_index;          /* NOT_IN_HEAP */
  uint64_t base, age;         /* urgency: base + layer, then age */
  uint32_t layers, layer, ready;
  size_t page, segment, n_pages;
  bool last;
  bool single;                /* out_write: one write, described by `write` */
  struct {
    uint32_t immediate, source_region, target_region;
    uint64_t source_offset, target_offset, nbytes;
  } write;
  uint32_t pages[];           /* n_pages source, then n_pages target */
};

struct plan {
  struct plan *next;
  uint64_t base;
  uint32_t layers;            /* of its deepest item */
  uint64_t seen;              /* the counter value it was last brought to */
  struct run *runs;
};

struct transfer {
  uint64_t id;
  struct transfer *bucket_next, *link_next, *link_previous;
  struct link *link;          /* NULL once drained */
  uint32_t link_id, immediate;
  tdm_geometry geometry;
  tdm_segment *segments;
  size_t n_segments;
  struct run *runs;
  bool finished;              /* the last item is wholly posted */
  bool stopped, drained;
  uint64_t unfinished, posted, completed, failed, nbytes;
  uint64_t completed_nbytes, hidden_nbytes; /* hidden: completed_nbytes when the last layer was seen done */
  uint64_t first_post_ns, last_layer_ns, last_completion_ns;
};

#define NOT_IN_HEAP SIZE_MAX
#define TRANSFER_BUCKETS 4096

/* These take the lock and return how much they did: post what is due, look at the layer counter. */
size_t transfer_post(struct tdm_core *core);
size_t plan_watch(struct tdm_core *core);
/* The rest need the lock. */
bool transfer_has_work(struct tdm_core *core);        /* something is postable */
void transfer_write_done(struct tdm_core *core, struct op *op, int error);
void transfer_link_closing(struct tdm_core *core, struct link *link); /* nothing of this link is posted from here on */
void transfer_link_closed(struct tdm_core *core, struct link *link);  /* its transfers end */
void transfer_forget(struct tdm_core *core, uint64_t transfer);       /* its end has been told */
void transfer_free(struct tdm_core *core);
struct transfer *transfer_find(struct tdm_core *core, uint64_t id);
int transfer_check(struct tdm_core *core, const tdm_plan_item *item); /* may it be taken? */
bool run_reserve(struct link *link);                  /* room for one more run: run_set_ready cannot fail then */
struct run *run_make(struct tdm_core *core, const tdm_plan_item *item, uint64_t base, uint32_t layers);
void run_add(struct run *run, struct transfer *transfer, struct plan *plan);
void run_set_ready(struct run *run, uint32_t ready);
void run_drop(struct run *run);
void run_heap_remove(struct link *link, struct run *run);
void run_heap_down(struct link *link, size_t index); /* the run there has become less urgent */
void plan_remove_ended(struct tdm_core *core);

/* --- counters.c -------------------------------------------------------------------------------------------------------------- */

struct counter {
  uint32_t gen;               /* 0: never armed */
  bool armed, reached;
  uint64_t expected, count;
};

void counters_immediate(struct tdm_core *core, uint32_t immediate); /* with the lock */

/* --- core.c, progress.c ------------------------------------------------------------------------------------------------------ */

enum command_kind { COMMAND_OPEN, COMMAND_CONNECT, COMMAND_CLOSE, COMMAND_REGISTER, COMMAND_BOOTSTRAP };

/* Lives on the caller's stack when the caller waits for `done`, else on the heap. */
struct command {
  struct command *next;
  enum command_kind kind;
  uint32_t link, region;
  bool waited, done;
  int result;
  uint8_t address[TDM_ADDRESS_MAX];
  size_t address_nbytes;
  uint8_t key[TDM_KEY_NBYTES];
  bool initiator;
  struct frame *frame;
};

struct event {
  struct event *next;
  tdm_event body;
  uint8_t data[];
};

struct region {
  void *memory;
  size_t nbytes;
  struct fid_mr *mr;
  void *desc;
  uint64_t key, base;
};

struct process {
  struct process *next;
  uint32_t link;
  int pidfd;
};

struct bootstrap_peer {
  struct bootstrap_peer *next;
  uint8_t address[TDM_ADDRESS_MAX];
  size_t address_nbytes;
  fi_addr_t peer;
  size_t queued;              /* frames that still need it */
  bool reached;               /* a frame was posted to it */
  uint64_t used_ns;
};

struct tdm_core {
  /* Fixed once the core is open. */
  const struct libfabric *lib;
  struct fi_info *fi;
  struct traits traits;
  tdm_info info;
  uint64_t node_id;
  uint32_t incarnation, spin_us;
  cpu_set_t *cpus;
  size_t cpus_nbytes;
  char name[16];
  pthread_t thread;
  int epoll_fd, command_fd, event_fd, cq_fd;

  /* The progress thread's own. */
  struct fid_fabric *fabric;
  struct fid_domain *domain;
  struct fid_wait *wait_set;  /* only with a sticky signal */
  struct fid_cq *cq;
  size_t cq_size;
  struct endpoint *endpoints;  /* the open ones */
  struct endpoint *bootstrap;
  struct bootstrap_peer *bootstrap_peers;
  size_t n_bootstrap_peers;
  bool forgot_unreached;      /* a peer that was never reached made room for another */
  struct frame_queue bootstrap_frames;
  uint64_t shm_number;
  bool layer_fd_armed;

  atomic_bool stopping;
  atomic_uint callers;        /* callers waiting for the lock: the post loop lets them in */

  pthread_mutex_t lock;
  pthread_cond_t answered;    /* a waited command is done */
  bool opened, failed;        /* the thread's answer to tdm_open */
  char error[512];
  bool sleeping;              /* a caller must write command_fd */
  uint64_t generation, seen_generation; /* moves with everything a caller queues */
  struct command *commands, **commands_tail;
  struct event *events, **events_tail;
  size_t bootstrap_event_frames;
  bool fatal;
  struct link *links;
  struct region regions[REGIONS_MAX];
  struct transfer **transfers;
  struct plan *plans;
  uint64_t age;
  const _Atomic uint64_t *layer_word;
  atomic_int layer_fd;
  uint64_t layers_done;       /* last value read */
  uint64_t writes_unfinished;
  struct process *processes;
  struct counter *counters;
  uint64_t counters_waiting;   /* armed and not yet reached: do not sleep long */
  uint64_t counters_receiving; /* begun as well: sleep only briefly */
  tdm_stats stats;
};

void *progress_run(void *core);                 /* the thread: opens, serves, closes */
void core_lock(struct tdm_core *core);          /* for callers */
void core_unlock(struct tdm_core *core);
void core_wake(struct tdm_core *core);          /* with the lock */
/* With the lock. `data` may be NULL. */
void core_event(struct tdm_core *core, const tdm_event *event, const void *data, size_t nbytes);
uint64_t core_random(void);

void core_command(struct tdm_core *core, struct command *command); /* with the lock; the thread frees it unless it is waited for */

/* endpoint.c: the progress thread's, without the lock */
int endpoint_open(struct tdm_core *core, struct link *link, struct endpoint **out, char *error, size_t error_nbytes);
void endpoint_close(struct tdm_core *core, struct endpoint *endpoint); /* no write lands through it any more */
void endpoint_free(struct endpoint *endpoint);                          /* once the completion queue ran dry */
void endpoint_received(struct tdm_core *core, struct op *op); /* op: nbytes, has_link and link_id say what came */
void endpoint_repost(struct tdm_core *core, struct op *op);
size_t endpoint_unpark(struct tdm_core *core);
size_t endpoint_send_frames(struct tdm_core *core);
void endpoint_send_done(struct op *op);
void frame_queue_push(struct frame_queue *queue, struct frame *frame);
struct frame *frame_queue_pop(struct frame_queue *queue);
void frame_queue_free(struct frame_queue *queue);

/* 1: posted, 0: try again later, negative: refused. With the lock. */
int endpoint_send_frame(struct tdm_core *core, struct endpoint *endpoint, struct link *link, fi_addr_t peer, const struct frame *frame);

/* bootstrap.c */
void bootstrap_command(struct tdm_core *core, struct command *command);
size_t bootstrap_send_frames(struct tdm_core *core); /* with the lock */
void bootstrap_sent(struct bootstrap_peer *peer);
/* Some peer has not yet noticed our first frame. 1.17's shm connects by a message that names the sender's file; a receiver that finds the file gone
 * crashes. So this endpoint's file must stay when we leave; the next start sweeps it. */
bool bootstrap_unreached(const struct tdm_core *core);
void bootstrap_free(struct tdm_core *core);

/* memory.c */
int memory_register(struct tdm_core *core, const struct region *region, uint64_t access, struct fid_mr **mr, uint64_t *key);
void memory_command(struct tdm_core *core, struct command *command);
int memory_grant(struct tdm_core *core, struct link *link); /* the keys of one link */
void memory_revoke(struct link *link);
void memory_free(struct tdm_core *core);

/* link.c */
struct link *link_find(struct tdm_core *core, uint32_t id); /* with the lock */
bool link_frames_waiting(struct tdm_core *core);            /* with the lock */
void link_command(struct tdm_core *core, struct command *command);
/* Ends the links whose endpoint is closed once what it left in the completion queue has been read. */
size_t link_finish_closing(struct tdm_core *core, bool queue_dry, size_t n_read);
void link_close_all(struct tdm_core *core);

#endif
