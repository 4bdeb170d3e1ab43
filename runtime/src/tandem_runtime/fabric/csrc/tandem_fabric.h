/* The C core of Tandem's fabric: endpoints, paged writes, immediates. No Python is ever called from here.
 *
 * One `tdm_core` is one NIC group: one libfabric domain, one completion queue, one progress thread. That thread is the only owner of
 * the endpoints: it opens, posts, polls and closes. Callers (one thread, the lead's event loop) talk to it by commands, which are queued
 * and never block on the network; it answers by events, read with tdm_next_event() after tdm_event_fd() turns readable. An event is
 * a transfer event, never a page event.
 *
 * Ids. A link is named by a nonzero u32, an outgoing transfer by a nonzero u64, a region by a small index: all chosen by the caller,
 * never reused within a core's life (regions: registered once).
 *
 * Errors. Functions return 0, or a negative errno / libfabric code; tdm_strerror() names both. Failures that happen later are events.
 */
#ifndef TANDEM_FABRIC_H
#define TANDEM_FABRIC_H

#include <stddef.h>
#include <stdint.h>

#define TDM_ADDRESS_MAX 256   /* bytes of an endpoint's opaque address */
#define TDM_FRAME_MAX 8192    /* bytes of one control frame, header and MAC included (efa-direct carries about this much) */
#define TDM_MAC_NBYTES 16
#define TDM_KEY_NBYTES 32
#define TDM_SLOTS 16384       /* 14-bit slots of the immediate */
#define TDM_POST_BATCH 32     /* posts per link before the next link gets its turn */

/* The immediate: kind:2 | gen:16 | slot:14. Generations start at 1, so it is never 0. */
enum { TDM_IMM_PAGE = 0, TDM_IMM_TAIL = 1, TDM_IMM_PROBE = 2 };

typedef struct tdm_core tdm_core;

typedef struct {
  const char *provider;       /* "net", "tcp", "shm", "efa", "verbs;ofi_rxm" */
  const char *bind_address;   /* numeric IP for net, tcp and verbs; NULL: the provider's own choice */
  const char *domain;         /* NIC (libfabric domain name), or NULL for the first that fits */
  uint16_t port_low, port_high; /* net, tcp: inclusive range; 0, 0: any */
  uint64_t node_id;           /* goes into the PONG headers that C writes */
  uint32_t incarnation;
  uint32_t spin_us;           /* while transfers are live: how long to poll without an event before sleeping */
  const int *cpus;            /* pin the progress thread here; NULL: do not */
  size_t n_cpus;
  const char *name;           /* thread name, at most 15 bytes */
  int one_endpoint;           /* 1: every link shares the bootstrap endpoint, as EFA always does; 0: the provider decides */
} tdm_config;

typedef struct {
  char provider[64], fabric[64], domain[64], version[32];
  int has_wait_fd;            /* 0: the thread backs off (shm) */
  int virtual_address;        /* remote addresses are virtual, not offsets */
  int provider_keys;          /* MR keys come from the provider; else they are random */
  int delivery_complete;      /* writes are posted with FI_DELIVERY_COMPLETE */
  int immediate_nbytes;
  int one_endpoint;           /* links share one endpoint: closing one is no fence at all */
  int close_fences_target;    /* after TDM_EV_LINK_CLOSED no write of the peer lands through that link */
  int close_fences_source;    /* after TDM_EV_LINK_CLOSED our memory is not read for writes posted on that link; shm: 0 */
  size_t max_message, max_write, tx_window;
} tdm_info;

/* Can this machine open the provider? Fills `text` with one line either way ("ok (libfabric 1.17, net)", or the reason). Returns 1 or 0.
 * The port range of net and tcp is read once in a process, by whichever call comes first: give the same one everywhere. */
int tdm_probe(const tdm_config *config, char *text, size_t text_nbytes);

/* Fills `error` (one line) on failure and returns NULL. */
tdm_core *tdm_open(const tdm_config *config, char *error, size_t error_nbytes);
/* Stops the thread and closes every endpoint, region and the domain. */
void tdm_close(tdm_core *core);
void tdm_get_info(tdm_core *core, tdm_info *info);
const char *tdm_strerror(int code);

/* --- memory ------------------------------------------------------------------------------------------------------------------- */

/* Maps `nbytes` of `fd` (a memfd), registers them for local and remote write, and reports the key and the base that a peer must use
 * (base 0 where the provider addresses by offset). Blocks; done at start. Regions live as long as the core. This key is good through every
 * link; a peer gets the keys of TDM_EV_LINK_OPEN, which die with its link. */
int tdm_register_fd(tdm_core *core, uint32_t region, int fd, size_t nbytes, uint64_t *key, uint64_t *base);
/* The core's mapping of a region, for tests and for tails. */
void *tdm_region_memory(tdm_core *core, uint32_t region);

/* --- links -------------------------------------------------------------------------------------------------------------------- */

/* The bootstrap endpoint's address, to be published. `nbytes`: in the room, out the length. */
int tdm_bootstrap_address(tdm_core *core, uint8_t *address, size_t *nbytes);
/* Sends one opaque frame from the bootstrap endpoint; unauthenticated, best effort, never blocks. */
int tdm_bootstrap_send(tdm_core *core, const uint8_t *address, size_t address_nbytes, const uint8_t *frame, size_t frame_nbytes);

typedef struct {
  uint64_t key, base, nbytes;
} tdm_remote_region;

/* Opens the endpoint of `link`; answered by TDM_EV_LINK_OPEN or TDM_EV_LINK_FAILED.
 *
 * TDM_EV_LINK_OPEN brings the link's address and, for each region registered so far in the order of their numbers, what the peer must use
 * to write into it. These keys die with the link. A key for each link closes a hole of net and tcp: they reconnect by themselves, so a writer
 * that has not heard of the close could reach a later endpoint that got the same port. Where links share an endpoint they are the regions'
 * own keys. */
int tdm_link_open(tdm_core *core, uint32_t link);

/* Tells an open link who its peer is, and the session key that seals frames in both directions: BLAKE2s-128 keyed with `key`, over
 * `direction byte || frame`, appended to the frame. `initiator` is 1 on the side that sent HELLO. The direction byte is 1 in frames from the
 * initiator and 2 in frames to it, so that a frame cannot be reflected. Frames that do not pass are counted and dropped; a PING is answered
 * without the caller. */
int tdm_link_connect(tdm_core *core, uint32_t link, const uint8_t *address, size_t nbytes, const uint8_t key[TDM_KEY_NBYTES],
                     int initiator);
/* The peer's regions, index = the peer's region id (its rank). Needed before tdm_out_begin. */
int tdm_link_regions(tdm_core *core, uint32_t link, const tdm_remote_region *regions, size_t n);
/* Queues one control frame (without MAC; the core appends it). Kept in order; -ENOBUFS when the link's queue is full. */
int tdm_link_send(tdm_core *core, uint32_t link, const uint8_t *frame, size_t nbytes);
/* What PONGs on this link carry from now on: `body` is opaque; the core adds how long ago this call was. */
int tdm_link_set_pong(tdm_core *core, uint32_t link, const uint8_t *body, size_t nbytes);
/* Posts nothing more on the link, and closes its endpoint. Answered by TDM_EV_LINK_CLOSED: from then on no write of the peer can land through it,
 * and (net, tcp, verbs) no byte of our memory is read for writes that were posted on it; tdm_info says where that holds. Before it,
 * outgoing transfers of the link with unfinished writes end with TDM_EV_OUT_DRAINED whose `link_closed` is 1: `completed` of them are known
 * to have ended well, of the rest nothing is known. Where links share an endpoint the writes end by themselves and `link_closed` is 0. */
int tdm_link_close(tdm_core *core, uint32_t link);

/* --- incoming transfers: counting ------------------------------------------------------------------------------------------- */

/* Arms slot for (gen, expected): before DISPATCH leaves, so no write can be early. expected 0 reports at once. */
int tdm_counter_arm(tdm_core *core, uint32_t slot, uint32_t gen, uint64_t expected);
/* Changes the expectation (to the peer's posted count after a cancel); reports again when count == expected. */
int tdm_counter_expect(tdm_core *core, uint32_t slot, uint32_t gen, uint64_t expected);
/* Immediates counted so far; 0 if the slot has another generation. */
uint64_t tdm_counter_read(tdm_core *core, uint32_t slot, uint32_t gen);
/* Later immediates with this generation are stale: counted, never applied. */
int tdm_counter_disarm(tdm_core *core, uint32_t slot, uint32_t gen);

/* --- outgoing transfers: paged writes --------------------------------------------------------------------------------------- */

/* A contiguous run of every page: equal sharding has one, the whole page. */
typedef struct {
  uint32_t source_region, target_region;
  uint64_t source_offset, target_offset; /* inside the page */
  uint64_t nbytes;
} tdm_segment;

typedef struct {
  uint64_t source_page_nbytes, source_layer_nbytes; /* strides of our pool */
  uint64_t target_page_nbytes, target_layer_nbytes; /* strides of the peer's */
  uint32_t layers;
} tdm_geometry;

/* Declares an outgoing transfer on `link`. Every write of it carries `immediate`. A write that fails stops its transfer: nothing is ever
 * posted twice. -ENOTCONN without a connected link and its regions. */
int tdm_out_begin(tdm_core *core, uint64_t transfer, uint32_t link, uint32_t immediate, const tdm_geometry *geometry,
                  const tdm_segment *segments, size_t n_segments);

typedef struct {
  uint64_t transfer;
  const uint32_t *source_pages, *target_pages;
  size_t n_pages;
  int last;                   /* nothing follows: the transfer drains when all of it is posted and complete */
} tdm_plan_item;

/* Items whose transfer has ended, stopped or failed are accepted and ignored: the caller learns of it by the event. Pages outside a region are
 * -ERANGE, an unknown transfer is -ENOENT; then nothing of the call is taken. */

/* Pages that are valid in every layer already (a prefix hit): posted as fast as the window allows. */
int tdm_out_post(tdm_core *core, const tdm_plan_item *item);
/* Publishes a step's plan before the step runs: layer l of the items is posted when the layer counter reaches base + l + 1. */
int tdm_plan_publish(tdm_core *core, uint64_t base, const tdm_plan_item *items, size_t n_items);
/* Withdraws a published plan whose pass failed: nothing more of it is posted once this returns. What was posted counts. */
int tdm_plan_abort(tdm_core *core, uint64_t base);
/* Stops posting for `transfer`. Answered by TDM_EV_OUT_DRAINED once what was posted has completed or its link is closed. */
int tdm_out_stop(tdm_core *core, uint64_t transfer);
/* One write outside the pages (tails, probes), counted with the transfer. Before the item marked `last`. */
int tdm_out_write(tdm_core *core, uint64_t transfer, uint32_t immediate, uint32_t source_region, uint64_t source_offset,
                  uint32_t target_region, uint64_t target_offset, uint64_t nbytes);

/* The layer counter to watch: a shared word (memfd, offset 0) and the eventfd its writer signals (-1: poll). */
int tdm_watch_counter(tdm_core *core, int memfd, int eventfd);
void tdm_store_release(uint64_t *word, uint64_t value);

/* --- processes (shm's source fence) ------------------------------------------------------------------------------------------- */

/* Reports TDM_EV_PROCESS_GONE once the process is gone. A stopped process is not gone. -ESRCH if it is gone already or its start time
 * (field 22 of /proc/PID/stat) differs. */
int tdm_watch_process(tdm_core *core, uint32_t link, int pid, uint64_t start_time);

/* --- events -------------------------------------------------------------------------------------------------------------------- */

enum {
  TDM_EV_NONE = 0,
  TDM_EV_BOOTSTRAP = 1,       /* data: a frame from the bootstrap endpoint, not authenticated */
  TDM_EV_LINK_OPEN = 2,       /* link; data: its address (`count` bytes), then a tdm_remote_region for each region */
  TDM_EV_LINK_FAILED = 3,     /* link, code; data: text. Still to be closed with tdm_link_close */
  TDM_EV_LINK_CLOSED = 4,     /* link */
  TDM_EV_FRAME = 5,           /* link; data: an authenticated frame without its MAC */
  TDM_EV_COUNT = 6,           /* slot, gen, count == expected */
  TDM_EV_OUT_DRAINED = 7,     /* transfer, link, counts and times below */
  TDM_EV_PROCESS_GONE = 8,    /* link */
  TDM_EV_FATAL = 9            /* code; data: text. The core is unusable */
};

typedef struct {
  uint32_t type, link;
  uint64_t transfer;
  uint32_t slot, gen;
  uint64_t count;
  int32_t code;
  int32_t link_closed;
  uint64_t posted, completed, failed, nbytes;
  uint64_t hidden_nbytes;     /* of writes that had completed at last_layer_ns: they crossed behind the compute */
  uint64_t first_post_ns, last_layer_ns, last_completion_ns; /* CLOCK_MONOTONIC; 0: never. last_layer: the last layer of the last
                                                                plan item was seen done */
  uint64_t time_ns;           /* when the event happened */
  size_t data_nbytes;
} tdm_event;

int tdm_event_fd(tdm_core *core);
/* Pops one event; its data, at most `capacity` bytes (TDM_FRAME_MAX fits all), goes to `data`. Returns 1, or 0 when there is none. */
int tdm_next_event(tdm_core *core, tdm_event *event, uint8_t *data, size_t capacity);

typedef struct {
  uint64_t writes_posted, writes_completed, writes_failed, bytes_posted;
  uint64_t immediates, immediates_stale, immediates_unknown;
  uint64_t frames_sent, frames_received, frames_rejected; /* rejected: bad MAC, size or magic */
  uint64_t pings_answered, cq_errors, eagain;
  uint64_t links_open, transfers_open, plans_pending;
  uint64_t sleeps, wakeups;   /* times the thread slept, and times a caller had to wake it */
  uint64_t thread_cpu_ns;     /* CPU time of the progress thread since it started */
} tdm_stats;

void tdm_get_stats(tdm_core *core, tdm_stats *stats);
/* CLOCK_MONOTONIC ns of the last authenticated frame from the link's peer (0: never), and the round trip of the last PING (0: none yet).
 * Writes do not count: an immediate does not say through which link it came. */
int tdm_link_health(tdm_core *core, uint32_t link, uint64_t *last_heard_ns, uint64_t *rtt_ns);

/* Keyed BLAKE2s (RFC 7693), digest of TDM_MAC_NBYTES; exported so that the tests can hold it against hashlib. */
void tdm_mac(const uint8_t key[TDM_KEY_NBYTES], const uint8_t *data, size_t nbytes, uint8_t mac[TDM_MAC_NBYTES]);
uint64_t tdm_now_ns(void);

#endif
