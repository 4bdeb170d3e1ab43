/* Links: what the caller asks of them, and what the progress thread does about it. Knows: states, addresses, keys. Does not know: frames'
 * meaning, writes.
 *
 * OPENING -> OPEN (endpoint up, address told) -> CONNECTED (peer and key known) -> CLOSING (the caller gave it up: nothing more is posted)
 * -> SHUT (endpoint closed; completions it left behind are still being read) -> gone, told by TDM_EV_LINK_CLOSED.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

enum { DIRECTION_FROM_INITIATOR = 1, DIRECTION_FROM_RESPONDER = 2 };

struct link *link_find(struct tdm_core *core, uint32_t id) {
  for (struct link *link = core->links; link != NULL; link = link->next) {
    if (link->id == id) return link;
  }
  return NULL;
}

bool link_frames_waiting(struct tdm_core *core) {
  for (const struct link *link = core->links; link != NULL; link = link->next) {
    if (link->state == LINK_CONNECTED && link->frames.head != NULL) return true;
  }
  return core->bootstrap_frames.head != NULL;
}

static bool usable(const struct link *link) {
  return link != NULL && link->connect_asked && (link->state == LINK_OPEN || link->state == LINK_CONNECTED);
}

/* --- the progress thread's side ---------------------------------------------------------------------------------------------- */

static void fail(struct tdm_core *core, struct link *link, int code, const char *text) {
  pthread_mutex_lock(&core->lock);
  if (link->state != LINK_CLOSING) { /* given up meanwhile: the caller waits for the close only */
    link->state = LINK_FAILED;
    transfer_link_closing(core, link);
    core_event(core, &(tdm_event){.type = TDM_EV_LINK_FAILED, .link = link->id, .code = code}, text, strlen(text));
  }
  pthread_mutex_unlock(&core->lock);
}

static void open_link(struct tdm_core *core, struct link *link) {
  char error[256];
  struct endpoint *endpoint = core->bootstrap;
  uint8_t told[TDM_ADDRESS_MAX + REGIONS_MAX * sizeof(tdm_remote_region)];
  int rc = 0;
  if (!core->traits.one_endpoint) rc = endpoint_open(core, link, &endpoint, error, sizeof error);
  if (rc == 0) {
    link->endpoint = endpoint;
    rc = memory_grant(core, link);
    if (rc != 0) snprintf(error, sizeof error, "%s: fi_mr_reg: %s", core->info.provider, tdm_strerror(rc));
  }
  if (rc != 0) {
    fail(core, link, rc, error);
    return;
  }
  size_t nbytes = endpoint->address_nbytes;
  memcpy(told, endpoint->address, nbytes);
  if (core->traits.one_endpoint) {
    memcpy(told + nbytes, &link->id, sizeof link->id);
    nbytes += sizeof link->id;
  }
  size_t address_nbytes = nbytes;
  for (size_t i = 0; i < REGIONS_MAX; i++) {
    if (link->grants[i].remote.nbytes == 0) continue;
    memcpy(told + nbytes, &link->grants[i].remote, sizeof(tdm_remote_region));
    nbytes += sizeof(tdm_remote_region);
  }
  pthread_mutex_lock(&core->lock);
  if (link->state == LINK_OPENING) {
    link->state = LINK_OPEN;
    core_event(core, &(tdm_event){.type = TDM_EV_LINK_OPEN, .link = link->id, .count = address_nbytes}, told, nbytes);
  }
  pthread_mutex_unlock(&core->lock);
}

static void connect_link(struct tdm_core *core, struct link *link, const struct command *command) {
  pthread_mutex_lock(&core->lock);
  bool open = link->state == LINK_OPEN;
  pthread_mutex_unlock(&core->lock);
  if (!open) return; /* failed, or given up meanwhile */
  uint32_t peer_link = 0;
  if (core->traits.one_endpoint) memcpy(&peer_link, command->address + command->address_nbytes - sizeof peer_link, sizeof peer_link);
  fi_addr_t peer = FI_ADDR_UNSPEC;
  int rc = fi_av_insert(link->endpoint->av, command->address, 1, &peer, 0, NULL);
  if (rc != 1) {
    char error[256];
    snprintf(error, sizeof error, "%s: fi_av_insert: the peer's address is refused (%s)", core->info.provider,
             rc < 0 ? tdm_strerror(rc) : "not reachable");
    fail(core, link, rc < 0 ? rc : -EHOSTUNREACH, error);
    return;
  }
  pthread_mutex_lock(&core->lock);
  memcpy(link->key, command->key, sizeof link->key);
  link->direction_out = command->initiator ? DIRECTION_FROM_INITIATOR : DIRECTION_FROM_RESPONDER;
  link->direction_in = command->initiator ? DIRECTION_FROM_RESPONDER : DIRECTION_FROM_INITIATOR;
  link->peer_link = peer_link;
  link->peer = peer;
  if (link->state == LINK_OPEN) link->state = LINK_CONNECTED;
  pthread_mutex_unlock(&core->lock);
}

static void close_link(struct tdm_core *core, struct link *link) {
  if (link->endpoint != NULL && !core->traits.one_endpoint) endpoint_close(core, link->endpoint);
  memory_revoke(link);
  pthread_mutex_lock(&core->lock);
  link->state = LINK_SHUT;
  link->shut_reads = 0;
  pthread_mutex_unlock(&core->lock);
}

void link_command(struct tdm_core *core, struct command *command) {
  pthread_mutex_lock(&core->lock);
  struct link *link = link_find(core, command->link);
  pthread_mutex_unlock(&core->lock);
  if (link == NULL) return;
  switch (command->kind) {
    case COMMAND_OPEN: open_link(core, link); break;
    case COMMAND_CONNECT: connect_link(core, link, command); break;
    case COMMAND_CLOSE: close_link(core, link); break;
    default: break;
  }
}

static void free_link(struct tdm_core *core, struct link *link) {
  if (link->endpoint != NULL && link->endpoint != core->bootstrap) endpoint_free(link->endpoint);
  frame_queue_free(&link->frames);
  free(link->remote);
  free(link->pong);
  free(link->heap);
  free(link);
}

size_t link_finish_closing(struct tdm_core *core, bool queue_dry, size_t n_read) {
  size_t worked = 0;
  pthread_mutex_lock(&core->lock);
  for (struct link **at = &core->links; *at != NULL;) {
    struct link *link = *at;
    if (link->state == LINK_SHUT) {
      link->shut_reads += n_read;
      /* The endpoint is closed, so all it will ever report is in the queue; the queue is read in order and holds no more than its size. A
       * shared endpoint is still open: there the writes themselves must end. */
      bool ended = core->traits.one_endpoint ? link->n_writes == 0 : queue_dry || link->shut_reads > 2 * core->cq_size;
      if (ended) {
        *at = link->next;
        transfer_link_closed(core, link);
        core_event(core, &(tdm_event){.type = TDM_EV_LINK_CLOSED, .link = link->id}, NULL, 0);
        core->stats.links_open--;
        free_link(core, link);
        worked++;
        continue;
      }
    }
    at = &link->next;
  }
  pthread_mutex_unlock(&core->lock);
  return worked;
}

void link_close_all(struct tdm_core *core) {
  for (struct link *link; (link = core->links) != NULL;) {
    core->links = link->next;
    if (link->endpoint != NULL && link->endpoint != core->bootstrap) endpoint_close(core, link->endpoint);
    memory_revoke(link);
    free_link(core, link);
  }
}

/* --- the caller's side ------------------------------------------------------------------------------------------------------- */

static int command_link(struct tdm_core *core, enum command_kind kind, uint32_t link) {
  struct command *command = calloc(1, sizeof *command);
  if (command == NULL) return -ENOMEM;
  command->kind = kind;
  command->link = link;
  core_command(core, command);
  return 0;
}

int tdm_link_open(tdm_core *core, uint32_t id) {
  if (id == 0) return -EINVAL;
  struct link *link = calloc(1, sizeof *link);
  if (link == NULL) return -ENOMEM;
  link->id = id;
  link->peer = FI_ADDR_UNSPEC;
  core_lock(core);
  int rc = link_find(core, id) != NULL ? -EEXIST : command_link(core, COMMAND_OPEN, id);
  if (rc == 0) {
    link->next = core->links;
    core->links = link;
    core->stats.links_open++;
  }
  core_unlock(core);
  if (rc != 0) free(link);
  return rc;
}

int tdm_link_connect(tdm_core *core, uint32_t id, const uint8_t *address, size_t nbytes, const uint8_t key[TDM_KEY_NBYTES],
                     int initiator) {
  if (nbytes < 2 || nbytes > TDM_ADDRESS_MAX) return -EINVAL;
  if (core->traits.one_endpoint && nbytes < sizeof(uint32_t) + 1) return -EINVAL;
  /* shm's addresses are strings, and its provider trusts that they end */
  if (core->traits.shm && address[nbytes - 1] != 0) return -EINVAL;
  struct command *command = calloc(1, sizeof *command);
  if (command == NULL) return -ENOMEM;
  command->kind = COMMAND_CONNECT;
  command->link = id;
  command->initiator = initiator != 0;
  memcpy(command->address, address, nbytes);
  command->address_nbytes = nbytes;
  memcpy(command->key, key, TDM_KEY_NBYTES);
  core_lock(core);
  struct link *link = link_find(core, id);
  int rc = link == NULL ? -ENOENT : link->connect_asked ? -EISCONN : link->state != LINK_OPEN ? -ENOTCONN : 0;
  if (rc == 0) {
    link->connect_asked = true;
    core_command(core, command);
  }
  core_unlock(core);
  if (rc != 0) free(command);
  return rc;
}

int tdm_link_regions(tdm_core *core, uint32_t id, const tdm_remote_region *regions, size_t n) {
  tdm_remote_region *copy = n > 0 ? malloc(n * sizeof *copy) : NULL;
  if (copy == NULL) return n > 0 ? -ENOMEM : -EINVAL;
  memcpy(copy, regions, n * sizeof *copy);
  core_lock(core);
  struct link *link = link_find(core, id);
  int rc = link == NULL ? -ENOENT : link->remote != NULL ? -EEXIST : !usable(link) ? -ENOTCONN : 0;
  if (rc == 0) {
    link->remote = copy;
    link->n_remote = n;
  }
  core_unlock(core);
  if (rc != 0) free(copy);
  return rc;
}

int tdm_link_send(tdm_core *core, uint32_t id, const uint8_t *data, size_t nbytes) {
  if (nbytes == 0 || nbytes > TDM_FRAME_MAX - TDM_MAC_NBYTES) return -EMSGSIZE;
  struct frame *frame = calloc(1, sizeof *frame + nbytes);
  if (frame == NULL) return -ENOMEM;
  frame->nbytes = nbytes;
  memcpy(frame->data, data, nbytes);
  core_lock(core);
  struct link *link = link_find(core, id);
  int rc = link == NULL ? -ENOENT : !usable(link) ? -ENOTCONN : link->frames.length >= FRAME_QUEUE_MAX ? -ENOBUFS : 0;
  if (rc == 0) {
    frame_queue_push(&link->frames, frame);
    core_wake(core);
  }
  core_unlock(core);
  if (rc != 0) free(frame);
  return rc;
}

int tdm_link_set_pong(tdm_core *core, uint32_t id, const uint8_t *body, size_t nbytes) {
  if (nbytes > TDM_FRAME_MAX - TDM_MAC_NBYTES - 40 - 16) return -EMSGSIZE;
  core_lock(core);
  struct link *link = link_find(core, id);
  int rc = link == NULL ? -ENOENT : 0;
  if (rc == 0) {
    uint8_t *copy = realloc(link->pong, nbytes > 0 ? nbytes : 1);
    if (copy == NULL) {
      rc = -ENOMEM;
    } else {
      memcpy(copy, body, nbytes);
      link->pong = copy;
      link->pong_nbytes = nbytes;
      link->pong_ns = tdm_now_ns();
    }
  }
  core_unlock(core);
  return rc;
}

int tdm_link_close(tdm_core *core, uint32_t id) {
  core_lock(core);
  struct link *link = link_find(core, id);
  int rc = link == NULL ? -ENOENT : link->state == LINK_CLOSING || link->state == LINK_SHUT ? -EALREADY : 0;
  if (rc == 0) rc = command_link(core, COMMAND_CLOSE, id);
  if (rc == 0) {
    link->state = LINK_CLOSING;
    transfer_link_closing(core, link);
  }
  core_unlock(core);
  return rc;
}

int tdm_link_health(tdm_core *core, uint32_t id, uint64_t *last_heard_ns, uint64_t *rtt_ns) {
  core_lock(core);
  struct link *link = link_find(core, id);
  int rc = link == NULL ? -ENOENT : 0;
  if (rc == 0) {
    *last_heard_ns = link->last_heard_ns;
    *rtt_ns = link->rtt_ns;
  }
  core_unlock(core);
  return rc;
}
