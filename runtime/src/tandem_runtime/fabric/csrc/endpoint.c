/* Endpoints, links and their frames. Knows: libfabric's objects, the seal of a frame, PING. Does not know: transfers, what frames mean.
 *
 * The bootstrap endpoint carries opaque frames from anyone. Each link has an endpoint and an address vector of its own, so that closing it
 * ends all that its peer can reach and nothing that another peer can. All endpoints report to one completion queue.
 *
 * EFA is different: one endpoint serves all peers, because a queue pair for each would waste the device. There a link is an address on the
 * bootstrap endpoint, its frames carry the receiver's link id as their 32-bit data, and closing it fences nothing (tdm_info says so). This
 * way of working is tested over TCP; it has not been run on EFA hardware.
 *
 * Every receive buffer is copied and reposted before its frame is handed on. When the caller leaves its events unread, receives are parked
 * instead of reposted: the provider then holds the peer back, and memory stays bounded.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "blake2s.h"
#include "core.h"

#define BUFFERS (RECEIVES_PER_ENDPOINT + SENDS_PER_ENDPOINT)

/* --- a frame's header, as far as the core must read it (messenger/wire.py) --------------------------------------------------- */

enum { HEADER_NBYTES = 40, TYPE_PING = 12, TYPE_PONG = 13, WIRE_VERSION = 1 };
static const uint32_t wire_magic = 0x4D444E54;

struct header {
  uint32_t magic;
  uint8_t version, type;
  uint16_t flags;
  uint64_t node;
  uint32_t incarnation, epoch, seq, length;
  uint16_t index, count;
  uint32_t zero;
} __attribute__((packed));
_Static_assert(sizeof(struct header) == HEADER_NBYTES, "wire.py's HEADER");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");

/* --- frame queues ------------------------------------------------------------------------------------------------------------ */

void frame_queue_push(struct frame_queue *queue, struct frame *frame) {
  frame->next = NULL;
  if (queue->tail != NULL) {
    queue->tail->next = frame;
  } else {
    queue->head = frame;
  }
  queue->tail = frame;
  queue->length++;
}

struct frame *frame_queue_pop(struct frame_queue *queue) {
  struct frame *frame = queue->head;
  if (frame == NULL) return NULL;
  queue->head = frame->next;
  if (queue->head == NULL) queue->tail = NULL;
  queue->length--;
  return frame;
}

void frame_queue_free(struct frame_queue *queue) {
  for (struct frame *frame; (frame = frame_queue_pop(queue)) != NULL;) free(frame);
}

/* --- seals ------------------------------------------------------------------------------------------------------------------- */

static void seal(const struct link *link, uint8_t direction, const uint8_t *frame, size_t nbytes, uint8_t mac[TDM_MAC_NBYTES]) {
  struct blake2s state;
  blake2s_begin(&state, link->key);
  blake2s_update(&state, &direction, 1);
  blake2s_update(&state, frame, nbytes);
  blake2s_end(&state, mac);
}

static bool seal_holds(const struct link *link, const uint8_t *frame, size_t nbytes) {
  uint8_t mac[TDM_MAC_NBYTES], difference = 0;
  seal(link, link->direction_in, frame, nbytes - TDM_MAC_NBYTES, mac);
  for (size_t i = 0; i < TDM_MAC_NBYTES; i++) difference |= mac[i] ^ frame[nbytes - TDM_MAC_NBYTES + i];
  return difference == 0;
}

/* --- opening and closing ----------------------------------------------------------------------------------------------------- */

static int open_fid_ep(struct tdm_core *core, struct endpoint *endpoint) {
  struct fi_info *info = core->lib->dupinfo(core->fi);
  if (info == NULL) return -FI_ENOMEM;
  if (core->traits.shm) {
    char name[TDM_ADDRESS_MAX];
    provider_shm_name(name, sizeof name, core->incarnation);
    free(info->src_addr);
    info->src_addr = strdup(name);
    info->src_addrlen = strlen(name) + 1;
  }
  int rc = fi_endpoint(core->domain, info, &endpoint->ep, NULL);
  core->lib->freeinfo(info);
  return rc;
}

static void list_ops(struct endpoint *endpoint, struct op *ops, size_t n, enum op_kind kind, uint8_t *buffers, struct op **list) {
  for (size_t i = 0; i < n; i++) {
    ops[i].kind = kind;
    ops[i].endpoint = endpoint;
    ops[i].buffer = buffers != NULL ? buffers + i * TDM_FRAME_MAX : NULL;
    ops[i].next = *list;
    *list = &ops[i];
  }
}

static size_t window_of(const struct tdm_core *core) {
  size_t size = core->fi->tx_attr->size;
  return size > 2 * WINDOW_RESERVE ? size - WINDOW_RESERVE : size / 2 > 0 ? size / 2 : 1;
}

int endpoint_open(struct tdm_core *core, struct link *link, struct endpoint **out, char *error, size_t error_nbytes) {
  const char *call = "memory";
  struct endpoint *endpoint = calloc(1, sizeof *endpoint);
  int rc = -FI_ENOMEM;
  *out = NULL;
  if (endpoint == NULL) goto failed;
  endpoint->link = link;
  endpoint->window = window_of(core);
  endpoint->writes = calloc(endpoint->window, sizeof *endpoint->writes);
  endpoint->buffers = mmap(NULL, BUFFERS * TDM_FRAME_MAX, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (endpoint->buffers == MAP_FAILED) endpoint->buffers = NULL;
  if (endpoint->writes == NULL || endpoint->buffers == NULL) goto failed;

  struct fi_av_attr av_attr = {.type = FI_AV_TABLE};
  call = "fi_av_open";
  if ((rc = fi_av_open(core->domain, &av_attr, &endpoint->av, NULL)) != 0) goto failed;
  call = "fi_endpoint";
  if ((rc = open_fid_ep(core, endpoint)) != 0) goto failed;
  call = "fi_ep_bind";
  if ((rc = fi_ep_bind(endpoint->ep, &core->cq->fid, FI_TRANSMIT | FI_RECV)) != 0) goto failed;
  if ((rc = fi_ep_bind(endpoint->ep, &endpoint->av->fid, 0)) != 0) goto failed;
  if (core->traits.one_endpoint) {
    /* FI_OPT_SHARED_MEMORY_PERMITTED (1.18): EFA must not take its same-host path. Unknown to other providers, which is as good. */
    const int shared_memory_permitted = 11;
    bool permitted = false;
    (void)fi_setopt(&endpoint->ep->fid, FI_OPT_ENDPOINT, shared_memory_permitted, &permitted, sizeof permitted);
  }
  call = "fi_enable";
  if ((rc = fi_enable(endpoint->ep)) != 0) goto failed;
  call = "fi_getname";
  endpoint->address_nbytes = sizeof endpoint->address;
  if ((rc = fi_getname(&endpoint->ep->fid, endpoint->address, &endpoint->address_nbytes)) != 0) goto failed;
  if (endpoint->address_nbytes > sizeof endpoint->address - sizeof(uint32_t)) {
    rc = -FI_ETOOSMALL;
    goto failed;
  }
  if (core->traits.local_keys) {
    call = "fi_mr_reg";
    rc = fi_mr_reg(core->domain, endpoint->buffers, BUFFERS * TDM_FRAME_MAX, FI_SEND | FI_RECV, 0,
                   core->traits.provider_keys ? 0 : core_random(), 0, &endpoint->buffers_mr, NULL);
    if (rc != 0) goto failed;
    endpoint->buffers_desc = fi_mr_desc(endpoint->buffers_mr);
  }
  list_ops(endpoint, endpoint->receives, RECEIVES_PER_ENDPOINT, OP_RECEIVE, endpoint->buffers, &endpoint->unposted);
  list_ops(endpoint, endpoint->sends, SENDS_PER_ENDPOINT, OP_SEND, endpoint->buffers + RECEIVES_PER_ENDPOINT * TDM_FRAME_MAX,
           &endpoint->free_sends);
  list_ops(endpoint, endpoint->writes, endpoint->window, OP_WRITE, NULL, &endpoint->free_writes);
  struct op *receives = endpoint->unposted;
  endpoint->unposted = NULL;
  for (struct op *next; receives != NULL; receives = next) {
    next = receives->next;
    endpoint_repost(core, receives);
  }
  endpoint->next = core->endpoints;
  core->endpoints = endpoint;
  *out = endpoint;
  return 0;

failed:
  if (error_nbytes > 0) {
    const char *hint = "";
    if (rc == -FI_EADDRNOTAVAIL || rc == -FI_EADDRINUSE) {
      hint = link != NULL ? "; every link takes a port: widen the port range"
                          : "; is the bind address one of this host's, and a port of the range free?";
    }
    snprintf(error, error_nbytes, "%s: %s: %s%s", core->info.provider, call, tdm_strerror(rc), hint);
  }
  if (endpoint != NULL) {
    endpoint_close(core, endpoint);
    endpoint_free(endpoint);
  }
  return rc;
}

void endpoint_close(struct tdm_core *core, struct endpoint *endpoint) {
  for (struct endpoint **at = &core->endpoints; *at != NULL; at = &(*at)->next) {
    if (*at == endpoint) {
      *at = endpoint->next;
      break;
    }
  }
  if (endpoint->ep != NULL) fi_close(&endpoint->ep->fid);
  if (endpoint->av != NULL) fi_close(&endpoint->av->fid);
  if (endpoint->buffers_mr != NULL) fi_close(&endpoint->buffers_mr->fid);
  endpoint->ep = NULL;
  endpoint->av = NULL;
  endpoint->buffers_mr = NULL;
}

void endpoint_free(struct endpoint *endpoint) {
  if (endpoint->buffers != NULL) munmap(endpoint->buffers, BUFFERS * TDM_FRAME_MAX);
  free(endpoint->writes);
  free(endpoint);
}

/* --- receiving --------------------------------------------------------------------------------------------------------------- */

void endpoint_repost(struct tdm_core *core, struct op *op) {
  (void)core;
  struct endpoint *endpoint = op->endpoint;
  if (endpoint->ep == NULL) return;
  ssize_t rc = fi_recv(endpoint->ep, op->buffer, TDM_FRAME_MAX, endpoint->buffers_desc, FI_ADDR_UNSPEC, op);
  if (rc != 0) { /* the provider is short of something for now: tried again with every turn */
    op->next = endpoint->unposted;
    endpoint->unposted = op;
  }
}

static void answer_ping(struct tdm_core *core, struct link *link, const struct header *ping, const uint8_t *sent_ns) {
  uint64_t age_ns = link->pong_ns != 0 ? tdm_now_ns() - link->pong_ns : UINT64_MAX; /* nothing published yet: infinitely old */
  size_t nbytes = HEADER_NBYTES + 16 + link->pong_nbytes;
  struct frame *frame = link->frames.length < FRAME_QUEUE_MAX ? malloc(sizeof *frame + nbytes) : NULL;
  if (frame == NULL) return; /* as good as lost on the wire: the peer asks again */
  struct header pong = {
      .magic = wire_magic, .version = WIRE_VERSION, .type = TYPE_PONG,
      .node = core->node_id, .incarnation = core->incarnation, .epoch = ping->epoch, .seq = ping->seq,
      .length = (uint32_t)(16 + link->pong_nbytes), .index = 0, .count = 1,
  };
  *frame = (struct frame){.nbytes = nbytes};
  memcpy(frame->data, &pong, HEADER_NBYTES);
  memcpy(frame->data + HEADER_NBYTES, sent_ns, 8);
  memcpy(frame->data + HEADER_NBYTES + 8, &age_ns, 8);
  memcpy(frame->data + HEADER_NBYTES + 16, link->pong, link->pong_nbytes);
  frame_queue_push(&link->frames, frame);
  core->stats.pings_answered++;
}

/* Which link a frame belongs to, if it is genuine; `*drop` when it is to be thrown away. Without the lock: only this thread changes links'
 * keys and frees links. */
static struct link *authenticate(struct tdm_core *core, const struct op *op, bool *drop) {
  struct link *link = op->endpoint->link;
  *drop = op->nbytes == 0 || op->nbytes > TDM_FRAME_MAX;
  if (link == NULL && !op->has_link) return NULL; /* bootstrap */
  if (link == NULL) {
    pthread_mutex_lock(&core->lock);
    link = link_find(core, op->link_id);
    pthread_mutex_unlock(&core->lock);
  }
  uint32_t magic = 0;
  if (op->nbytes >= HEADER_NBYTES) memcpy(&magic, op->buffer, sizeof magic);
  *drop = *drop || link == NULL || link->peer == FI_ADDR_UNSPEC || op->nbytes < HEADER_NBYTES + TDM_MAC_NBYTES ||
          magic != wire_magic || !seal_holds(link, op->buffer, op->nbytes);
  return link;
}

/* With the lock. Returns false when the caller has left too many frames unread. */
static bool hand_on(struct tdm_core *core, struct link *link, const struct op *op, bool in_turn) {
  size_t *waiting = link != NULL ? &link->event_frames : &core->bootstrap_event_frames;
  uint64_t now = tdm_now_ns();
  struct header header;
  if (link != NULL) {
    memcpy(&header, op->buffer, sizeof header);
    link->last_heard_ns = now;
    if (header.type == TYPE_PING && op->nbytes == HEADER_NBYTES + 8 + TDM_MAC_NBYTES) {
      core->stats.frames_received++;
      answer_ping(core, link, &header, op->buffer + HEADER_NBYTES);
      return true;
    }
  }
  if (!in_turn || *waiting >= EVENT_FRAMES_MAX) return false;
  ++*waiting;
  core->stats.frames_received++;
  if (link == NULL) {
    core_event(core, &(tdm_event){.type = TDM_EV_BOOTSTRAP}, op->buffer, op->nbytes);
    return true;
  }
  if (header.type == TYPE_PONG && op->nbytes >= HEADER_NBYTES + 8 + TDM_MAC_NBYTES) {
    uint64_t sent_ns;
    memcpy(&sent_ns, op->buffer + HEADER_NBYTES, sizeof sent_ns);
    if (sent_ns <= now) link->rtt_ns = now - sent_ns;
  }
  core_event(core, &(tdm_event){.type = TDM_EV_FRAME, .link = link->id}, op->buffer, op->nbytes - TDM_MAC_NBYTES);
  return true;
}

/* Returns whether the buffer is free again. `in_turn`: no earlier frame of this endpoint is parked. */
static bool take_frame(struct tdm_core *core, struct op *op, bool in_turn) {
  bool drop, taken = true;
  struct link *link = authenticate(core, op, &drop);
  pthread_mutex_lock(&core->lock);
  if (drop) {
    core->stats.frames_rejected++;
  } else if (link == NULL || link->state == LINK_CONNECTED) {
    taken = hand_on(core, link, op, in_turn);
  }
  pthread_mutex_unlock(&core->lock);
  return taken;
}

void endpoint_received(struct tdm_core *core, struct op *op) {
  struct endpoint *endpoint = op->endpoint;
  if (take_frame(core, op, endpoint->parked == NULL)) {
    endpoint_repost(core, op);
    return;
  }
  op->next = NULL;
  *(endpoint->parked == NULL ? &endpoint->parked : endpoint->parked_tail) = op;
  endpoint->parked_tail = &op->next;
}

static size_t unpark(struct tdm_core *core, struct endpoint *endpoint) {
  size_t worked = 0;
  struct op *unposted = endpoint->unposted;
  endpoint->unposted = NULL;
  for (struct op *next; unposted != NULL; unposted = next) {
    next = unposted->next;
    endpoint_repost(core, unposted);
  }
  for (struct op *op; (op = endpoint->parked) != NULL && take_frame(core, op, true); worked++) {
    endpoint->parked = op->next;
    endpoint_repost(core, op);
  }
  return worked;
}

size_t endpoint_unpark(struct tdm_core *core) {
  size_t worked = 0;
  for (struct endpoint *endpoint = core->endpoints; endpoint != NULL; endpoint = endpoint->next) worked += unpark(core, endpoint);
  return worked;
}

/* --- sending ----------------------------------------------------------------------------------------------------------------- */

int endpoint_send_frame(struct tdm_core *core, struct endpoint *endpoint, struct link *link, fi_addr_t peer, const struct frame *frame) {
  struct op *op = endpoint->free_sends;
  if (op == NULL) return 0;
  size_t nbytes = frame->nbytes;
  memcpy(op->buffer, frame->data, nbytes);
  if (link != NULL) {
    seal(link, link->direction_out, frame->data, nbytes, op->buffer + nbytes);
    nbytes += TDM_MAC_NBYTES;
  }
  op->bootstrap_peer = frame->peer;
  ssize_t rc = link != NULL && core->traits.one_endpoint
                   ? fi_senddata(endpoint->ep, op->buffer, nbytes, endpoint->buffers_desc, link->peer_link, peer, op)
                   : fi_send(endpoint->ep, op->buffer, nbytes, endpoint->buffers_desc, peer, op);
  if (rc == -FI_EAGAIN) return 0;
  if (rc != 0) return (int)rc;
  endpoint->free_sends = op->next;
  core->stats.frames_sent++;
  return 1;
}

static size_t send_link_frames(struct tdm_core *core, struct link *link) {
  size_t worked = 0;
  while (link->frames.head != NULL) {
    int rc = endpoint_send_frame(core, link->endpoint, link, link->peer, link->frames.head);
    if (rc == 0) {
      core->stats.eagain++;
      break;
    }
    free(frame_queue_pop(&link->frames)); /* a refused frame is lost like one on the wire */
    worked++;
  }
  return worked;
}

size_t endpoint_send_frames(struct tdm_core *core) {
  size_t worked = 0;
  pthread_mutex_lock(&core->lock);
  if (core->bootstrap_frames.head != NULL) worked += bootstrap_send_frames(core);
  for (struct link *link = core->links; link != NULL; link = link->next) {
    if (link->state == LINK_CONNECTED && link->frames.head != NULL) worked += send_link_frames(core, link);
  }
  pthread_mutex_unlock(&core->lock);
  return worked;
}

void endpoint_send_done(struct op *op) {
  if (op->bootstrap_peer != NULL) bootstrap_sent(op->bootstrap_peer);
  op->bootstrap_peer = NULL;
  op->next = op->endpoint->free_sends;
  op->endpoint->free_sends = op;
}
