/* Frames outside any link: HELLO and its answers, to and from anyone. Knows: the addresses it has sent to. Does not know: frames' meaning.
 *
 * Best effort, like a datagram: a frame that cannot be posted for two seconds is dropped, and one peer that does not answer does not hold up
 * the others.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

/* The address's entry in the bootstrap endpoint's vector; the one unused for longest makes room. */
static struct bootstrap_peer *peer_of(struct tdm_core *core, const struct command *command) {
  struct bootstrap_peer **oldest = NULL;
  for (struct bootstrap_peer **at = &core->bootstrap_peers; *at != NULL; at = &(*at)->next) {
    struct bootstrap_peer *peer = *at;
    if (peer->address_nbytes == command->address_nbytes && memcmp(peer->address, command->address, peer->address_nbytes) == 0) return peer;
    if (peer->queued == 0 && (oldest == NULL || peer->used_ns < (*oldest)->used_ns)) oldest = at;
  }
  if (core->n_bootstrap_peers >= BOOTSTRAP_PEERS_MAX) {
    if (oldest == NULL) return NULL;
    struct bootstrap_peer *gone = *oldest;
    *oldest = gone->next;
    core->forgot_unreached |= !gone->reached;
    fi_av_remove(core->bootstrap->av, &gone->peer, 1, 0);
    free(gone);
    core->n_bootstrap_peers--;
  }
  struct bootstrap_peer *peer = calloc(1, sizeof *peer);
  if (peer == NULL) return NULL;
  memcpy(peer->address, command->address, command->address_nbytes);
  peer->address_nbytes = command->address_nbytes;
  if (fi_av_insert(core->bootstrap->av, peer->address, 1, &peer->peer, 0, NULL) != 1) {
    free(peer);
    return NULL;
  }
  peer->next = core->bootstrap_peers;
  core->bootstrap_peers = peer;
  core->n_bootstrap_peers++;
  return peer;
}

void bootstrap_command(struct tdm_core *core, struct command *command) {
  struct bootstrap_peer *peer = core->bootstrap_frames.length < FRAME_QUEUE_MAX ? peer_of(core, command) : NULL;
  if (peer == NULL) {
    free(command->frame);
    return;
  }
  peer->queued++;
  peer->used_ns = tdm_now_ns();
  command->frame->peer = peer;
  command->frame->queued_ns = peer->used_ns;
  frame_queue_push(&core->bootstrap_frames, command->frame);
}

void bootstrap_sent(struct bootstrap_peer *peer) { peer->queued--; }

size_t bootstrap_send_frames(struct tdm_core *core) {
  size_t worked = 0;
  struct frame_queue waiting = {0};
  uint64_t now = tdm_now_ns();
  for (struct frame *frame; (frame = frame_queue_pop(&core->bootstrap_frames)) != NULL;) {
    struct bootstrap_peer *peer = frame->peer;
    int rc = endpoint_send_frame(core, core->bootstrap, NULL, peer->peer, frame);
    if (rc == 0 && now - frame->queued_ns < BOOTSTRAP_PATIENCE_NS) {
      frame_queue_push(&waiting, frame);
      continue;
    }
    if (rc <= 0) peer->queued--; /* else when the send is done */
    if (rc > 0) peer->reached = true;
    free(frame);
    worked++;
  }
  core->bootstrap_frames = waiting;
  return worked;
}

bool bootstrap_unreached(const struct tdm_core *core) {
  for (const struct bootstrap_peer *peer = core->bootstrap_peers; peer != NULL; peer = peer->next) {
    if (!peer->reached) return true;
  }
  return core->forgot_unreached;
}

void bootstrap_free(struct tdm_core *core) {
  frame_queue_free(&core->bootstrap_frames);
  for (struct bootstrap_peer *peer; (peer = core->bootstrap_peers) != NULL;) {
    core->bootstrap_peers = peer->next;
    free(peer);
  }
}

int tdm_bootstrap_address(tdm_core *core, uint8_t *address, size_t *nbytes) {
  if (*nbytes < core->bootstrap->address_nbytes) return -ENOSPC;
  *nbytes = core->bootstrap->address_nbytes;
  memcpy(address, core->bootstrap->address, *nbytes);
  return 0;
}

int tdm_bootstrap_send(tdm_core *core, const uint8_t *address, size_t address_nbytes, const uint8_t *data, size_t nbytes) {
  if (address_nbytes == 0 || address_nbytes > TDM_ADDRESS_MAX) return -EINVAL;
  if (core->traits.shm && address[address_nbytes - 1] != 0) return -EINVAL;
  if (nbytes == 0 || nbytes > TDM_FRAME_MAX) return -EMSGSIZE;
  struct command *command = calloc(1, sizeof *command);
  struct frame *frame = calloc(1, sizeof *frame + nbytes);
  if (command == NULL || frame == NULL) {
    free(command);
    free(frame);
    return -ENOMEM;
  }
  frame->nbytes = nbytes;
  memcpy(frame->data, data, nbytes);
  command->kind = COMMAND_BOOTSTRAP;
  command->frame = frame;
  memcpy(command->address, address, address_nbytes);
  command->address_nbytes = address_nbytes;
  core_lock(core);
  core_command(core, command);
  core_unlock(core);
  return 0;
}
