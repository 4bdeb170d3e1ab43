/* Outgoing transfers: which write is posted next. Knows: pages, layers, windows. Does not know: plans, why, or who the peer is.
 *
 * A transfer's pages come in runs: the pages of one plan item, in all layers. `ready` of a run's layers may be posted: all of them for pages
 * that are valid already, else as many as plan.c says. Each link keeps its postable runs in a heap by (base + layer, age): layer by layer
 * across requests, the oldest first. One turn posts at most TDM_POST_BATCH writes on a link before the next link gets its turn, and a full
 * window or an EAGAIN only ends that link's turn.
 *
 * Stopping is exact because posting happens under the core's lock, one write at a time: once tdm_plan_abort, tdm_out_stop or tdm_link_close has
 * removed the runs, nothing of them is posted any more. A write that fails stops its transfer; nothing is posted twice.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

/* --- transfers --------------------------------------------------------------------------------------------------------------- */

static struct transfer **bucket(struct tdm_core *core, uint64_t id) {
  return &core->transfers[(id ^ id >> 14 ^ id >> 32) % TRANSFER_BUCKETS];
}

struct transfer *transfer_find(struct tdm_core *core, uint64_t id) {
  struct transfer *transfer = *bucket(core, id);
  while (transfer != NULL && transfer->id != id) transfer = transfer->bucket_next;
  return transfer;
}

static void end_if_drained(struct tdm_core *core, struct transfer *transfer, bool link_closed) {
  bool posted_all = transfer->stopped || (transfer->finished && transfer->runs == NULL);
  if (transfer->drained || !posted_all || (transfer->unfinished > 0 && !link_closed)) return;
  transfer->drained = true;
  struct link *link = transfer->link;
  *(transfer->link_previous != NULL ? &transfer->link_previous->link_next : &link->transfers) = transfer->link_next;
  if (transfer->link_next != NULL) transfer->link_next->link_previous = transfer->link_previous;
  transfer->link = NULL;
  core_event(core,
             &(tdm_event){.type = TDM_EV_OUT_DRAINED, .link = transfer->link_id, .transfer = transfer->id, .link_closed = link_closed,
                          .posted = transfer->posted, .completed = transfer->completed, .failed = transfer->failed,
                          .nbytes = transfer->nbytes, .hidden_nbytes = transfer->hidden_nbytes, .first_post_ns = transfer->first_post_ns,
                          .last_layer_ns = transfer->last_layer_ns, .last_completion_ns = transfer->last_completion_ns},
             NULL, 0);
}

static void stop(struct transfer *transfer) {
  transfer->stopped = true;
  while (transfer->runs != NULL) run_drop(transfer->runs);
}

/* --- posting ----------------------------------------------------------------------------------------------------------------- */

/* The run's next write was posted: moves on to the one after it. Layers without pages pass by here too. */
static void advance(struct tdm_core *core, struct link *link, struct run *run) {
  struct transfer *transfer = run->transfer;
  if (!run->single && run->n_pages > 0) {
    if (++run->segment < transfer->n_segments) return;
    run->segment = 0;
    if (++run->page < run->n_pages) return;
    run->page = 0;
  }
  run->layer = run->n_pages > 0 ? run->layer + 1 : run->ready;
  if (run->layer == run->layers) {
    if (run->last) transfer->finished = true;
    run_drop(run);
    end_if_drained(core, transfer, false);
  } else if (run->layer == run->ready) {
    run_heap_remove(link, run);
  } else {
    run_heap_down(link, run->heap_index);
  }
}

/* Never without an immediate: over shm a plain write goes straight into the peer's memory, whatever its key. */
static ssize_t write_with_immediate(struct tdm_core *core, struct fid_ep *ep, void *source, size_t nbytes, void *desc, uint32_t immediate,
                                    fi_addr_t peer, uint64_t target, uint64_t key, struct op *op) {
  if (!core->traits.delivery_complete) return fi_writedata(ep, source, nbytes, desc, immediate, peer, target, key, op);
  /* net's fi_writedata does not look at the endpoint's operation flags, so they are given with each write. */
  struct iovec local = {.iov_base = source, .iov_len = nbytes};
  struct fi_rma_iov remote = {.addr = target, .len = nbytes, .key = key};
  struct fi_msg_rma message = {.msg_iov = &local, .desc = &desc, .iov_count = 1, .addr = peer, .rma_iov = &remote, .rma_iov_count = 1,
                               .context = op, .data = immediate};
  return fi_writemsg(ep, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION | FI_DELIVERY_COMPLETE);
}

/* 1: posted, 0: not now, negative: refused for good. */
static int post_write(struct tdm_core *core, struct link *link, struct run *run) {
  struct transfer *transfer = run->transfer;
  struct endpoint *endpoint = link->endpoint;
  uint32_t immediate = run->single ? run->write.immediate : transfer->immediate;
  uint32_t source_region, target_region;
  uint64_t source, target, nbytes;
  if (run->single) {
    source_region = run->write.source_region;
    target_region = run->write.target_region;
    source = run->write.source_offset;
    target = run->write.target_offset;
    nbytes = run->write.nbytes;
  } else {
    const tdm_segment *segment = &transfer->segments[run->segment];
    const tdm_geometry *geometry = &transfer->geometry;
    source_region = segment->source_region;
    target_region = segment->target_region;
    source = run->layer * geometry->source_layer_nbytes + run->pages[run->page] * geometry->source_page_nbytes + segment->source_offset;
    target = run->layer * geometry->target_layer_nbytes + run->pages[run->n_pages + run->page] * geometry->target_page_nbytes +
             segment->target_offset;
    nbytes = segment->nbytes;
  }
  struct op *op = endpoint->free_writes;
  if (op == NULL) return 0;
  if (endpoint->write_nbytes > 0 && endpoint->write_nbytes + nbytes > WINDOW_NBYTES) return 0;
  const struct region *region = &core->regions[source_region];
  const tdm_remote_region *remote = &link->remote[target_region];
  op->transfer = transfer;
  op->nbytes = nbytes;
  uint64_t posting_ns = transfer->posted == 0 ? tdm_now_ns() : 0; /* before the post: the write may land before it returns */
  ssize_t rc = write_with_immediate(core, endpoint->ep, (uint8_t *)region->memory + source, nbytes, region->desc, immediate, link->peer,
                                    remote->base + target, remote->key, op);
  if (rc == -FI_EAGAIN) {
    core->stats.eagain++;
    return 0;
  }
  if (rc != 0) return (int)rc;
  endpoint->free_writes = op->next;
  endpoint->write_nbytes += nbytes;
  link->n_writes++;
  core->writes_unfinished++;
  if (transfer->posted == 0) transfer->first_post_ns = posting_ns;
  transfer->posted++;
  transfer->unfinished++;
  transfer->nbytes += nbytes;
  core->stats.writes_posted++;
  core->stats.bytes_posted += nbytes;
  return 1;
}

static size_t post_on_link(struct tdm_core *core, struct link *link) {
  size_t worked = 0;
  for (size_t n = 0; n < TDM_POST_BATCH && link->heap_length > 0; n++) {
    struct run *run = link->heap[0];
    struct transfer *transfer = run->transfer;
    if (run->n_pages > 0) {
      int rc = post_write(core, link, run);
      if (rc == 0) break;
      if (rc < 0) {
        transfer->failed++;
        core->stats.writes_failed++;
        stop(transfer);
        end_if_drained(core, transfer, false);
        worked++;
        continue;
      }
    }
    advance(core, link, run);
    worked++;
    if (atomic_load_explicit(&core->callers, memory_order_relaxed) > 0) break;
  }
  return worked;
}

size_t transfer_post(struct tdm_core *core) {
  size_t worked = 0;
  pthread_mutex_lock(&core->lock);
  for (struct link *link = core->links; link != NULL; link = link->next) { /* new links come in front, and only this thread removes one */
    if (link->state == LINK_CONNECTED && link->heap_length > 0) worked += post_on_link(core, link);
    pthread_mutex_unlock(&core->lock); /* lets callers in */
    pthread_mutex_lock(&core->lock);
  }
  pthread_mutex_unlock(&core->lock);
  return worked;
}

bool transfer_has_work(struct tdm_core *core) {
  for (const struct link *link = core->links; link != NULL; link = link->next) {
    if (link->state == LINK_CONNECTED && link->heap_length > 0) return true;
  }
  return false;
}

void transfer_write_done(struct tdm_core *core, struct op *op, int error) {
  struct transfer *transfer = op->transfer;
  struct link *link = transfer->link;
  op->endpoint->write_nbytes -= op->nbytes;
  op->next = op->endpoint->free_writes;
  op->endpoint->free_writes = op;
  core->writes_unfinished--;
  transfer->unfinished--;
  transfer->last_completion_ns = tdm_now_ns();
  link->n_writes--;
  if (error == 0) {
    transfer->completed++;
    transfer->completed_nbytes += op->nbytes;
    core->stats.writes_completed++;
  } else {
    transfer->failed++;
    core->stats.writes_failed++;
    stop(transfer);
  }
  if (link->state != LINK_SHUT) end_if_drained(core, transfer, false); /* else all end together, by transfer_link_closed */
}

void transfer_link_closing(struct tdm_core *core, struct link *link) {
  for (struct transfer *transfer = link->transfers, *next; transfer != NULL; transfer = next) {
    next = transfer->link_next;
    stop(transfer);
    end_if_drained(core, transfer, false);
  }
}

void transfer_link_closed(struct tdm_core *core, struct link *link) {
  core->writes_unfinished -= link->n_writes;
  while (link->transfers != NULL) end_if_drained(core, link->transfers, true);
}

/* --- the caller's side ------------------------------------------------------------------------------------------------------- */

/* Does `nbytes` at `offset` + steps lie inside `size`? Every factor comes from a peer or a caller, so none may wrap. */
static bool inside(uint64_t size, uint64_t layers, uint64_t layer_nbytes, uint64_t page, uint64_t page_nbytes, uint64_t offset,
                   uint64_t nbytes) {
  unsigned __int128 end = (unsigned __int128)(layers - 1) * layer_nbytes;
  end += (unsigned __int128)page * page_nbytes;
  end += (unsigned __int128)offset + nbytes;
  return end <= size;
}

static bool fits(struct tdm_core *core, const struct link *link, const tdm_geometry *geometry, const tdm_segment *segment,
                 uint32_t source_page, uint32_t target_page) {
  return inside(core->regions[segment->source_region].nbytes, geometry->layers, geometry->source_layer_nbytes, source_page,
                geometry->source_page_nbytes, segment->source_offset, segment->nbytes) &&
         inside(link->remote[segment->target_region].nbytes, geometry->layers, geometry->target_layer_nbytes, target_page,
                geometry->target_page_nbytes, segment->target_offset, segment->nbytes);
}

static bool regions_known(struct tdm_core *core, const struct link *link, uint32_t source, uint32_t target) {
  return source < REGIONS_MAX && core->regions[source].mr != NULL && target < link->n_remote;
}

int tdm_out_begin(tdm_core *core, uint64_t id, uint32_t link_id, uint32_t immediate, const tdm_geometry *geometry,
                  const tdm_segment *segments, size_t n_segments) {
  if (id == 0 || immediate == 0 || geometry->layers == 0 || n_segments == 0) return -EINVAL;
  struct transfer *transfer = calloc(1, sizeof *transfer);
  tdm_segment *copy = malloc(n_segments * sizeof *copy);
  if (transfer == NULL || copy == NULL) {
    free(transfer);
    free(copy);
    return -ENOMEM;
  }
  memcpy(copy, segments, n_segments * sizeof *copy);
  *transfer = (struct transfer){.id = id, .link_id = link_id, .immediate = immediate, .geometry = *geometry, .segments = copy,
                                .n_segments = n_segments};
  core_lock(core);
  struct link *link = link_find(core, link_id);
  int rc = 0;
  if (link == NULL || link->remote == NULL || (link->state != LINK_OPEN && link->state != LINK_CONNECTED)) {
    rc = -ENOTCONN;
  } else if (transfer_find(core, id) != NULL) {
    rc = -EEXIST;
  } else {
    for (size_t i = 0; i < n_segments && rc == 0; i++) {
      if (!regions_known(core, link, copy[i].source_region, copy[i].target_region)) {
        rc = -ENXIO;
      } else if (copy[i].nbytes == 0 || copy[i].nbytes > core->info.max_write) {
        rc = -EMSGSIZE;
      } else if (!fits(core, link, geometry, &copy[i], 0, 0)) {
        rc = -ERANGE;
      }
    }
  }
  if (rc == 0) {
    transfer->link = link;
    transfer->link_next = link->transfers;
    if (link->transfers != NULL) link->transfers->link_previous = transfer;
    link->transfers = transfer;
    transfer->bucket_next = *bucket(core, id);
    *bucket(core, id) = transfer;
    core->stats.transfers_open++;
  }
  core_unlock(core);
  if (rc != 0) {
    free(transfer->segments);
    free(transfer);
  }
  return rc;
}

void transfer_forget(struct tdm_core *core, uint64_t id) {
  struct transfer **at = bucket(core, id);
  while (*at != NULL && (*at)->id != id) at = &(*at)->bucket_next;
  struct transfer *transfer = *at;
  if (transfer == NULL) return;
  *at = transfer->bucket_next;
  free(transfer->segments);
  free(transfer);
  core->stats.transfers_open--;
}

int transfer_check(struct tdm_core *core, const tdm_plan_item *item) {
  const struct transfer *transfer = transfer_find(core, item->transfer);
  if (transfer == NULL) return -ENOENT;
  if (transfer->stopped || transfer->drained) return 0; /* its end is an event the caller has not read yet */
  for (size_t s = 0; s < transfer->n_segments; s++) {
    for (size_t i = 0; i < item->n_pages; i++) {
      if (!fits(core, transfer->link, &transfer->geometry, &transfer->segments[s], item->source_pages[i], item->target_pages[i])) return -ERANGE;
    }
  }
  return 0;
}

int tdm_out_post(tdm_core *core, const tdm_plan_item *item) {
  core_lock(core);
  int rc = transfer_check(core, item);
  struct transfer *transfer = rc == 0 ? transfer_find(core, item->transfer) : NULL;
  if (transfer != NULL && !transfer->stopped && !transfer->drained) {
    struct run *run = run_reserve(transfer->link) ? run_make(core, item, core->layers_done, transfer->geometry.layers) : NULL;
    if (run == NULL) {
      rc = -ENOMEM;
    } else {
      run_add(run, transfer, NULL);
      run_set_ready(run, run->layers);
      core_wake(core);
    }
  }
  core_unlock(core);
  return rc;
}

int tdm_out_stop(tdm_core *core, uint64_t id) {
  core_lock(core);
  struct transfer *transfer = transfer_find(core, id);
  if (transfer != NULL && !transfer->drained) {
    stop(transfer);
    end_if_drained(core, transfer, false);
  }
  core_unlock(core);
  return transfer != NULL ? 0 : -ENOENT;
}

int tdm_out_write(tdm_core *core, uint64_t id, uint32_t immediate, uint32_t source_region, uint64_t source_offset, uint32_t target_region,
                  uint64_t target_offset, uint64_t nbytes) {
  if (immediate == 0 || nbytes == 0 || nbytes > core->info.max_write) return -EINVAL;
  core_lock(core);
  int rc = 0;
  struct transfer *transfer = transfer_find(core, id);
  if (transfer == NULL) {
    rc = -ENOENT;
  } else if (!transfer->stopped && !transfer->drained) {
    struct link *link = transfer->link;
    struct run *run = NULL;
    if (!regions_known(core, link, source_region, target_region)) {
      rc = -ENXIO;
    } else if (!inside(core->regions[source_region].nbytes, 1, 0, 0, 0, source_offset, nbytes) ||
               !inside(link->remote[target_region].nbytes, 1, 0, 0, 0, target_offset, nbytes)) {
      rc = -ERANGE;
    } else if (!run_reserve(link) || (run = run_make(core, &(tdm_plan_item){.transfer = id}, core->layers_done, 1)) == NULL) {
      rc = -ENOMEM;
    } else {
      run->single = true;
      run->n_pages = 1; /* no page ids: the write is described in full */
      run->write.immediate = immediate;
      run->write.source_region = source_region;
      run->write.target_region = target_region;
      run->write.source_offset = source_offset;
      run->write.target_offset = target_offset;
      run->write.nbytes = nbytes;
      run_add(run, transfer, NULL);
      run_set_ready(run, 1);
      core_wake(core);
    }
  }
  core_unlock(core);
  return rc;
}

void transfer_free(struct tdm_core *core) {
  for (size_t i = 0; i < TRANSFER_BUCKETS; i++) {
    for (struct transfer *transfer; (transfer = core->transfers[i]) != NULL;) {
      core->transfers[i] = transfer->bucket_next;
      while (transfer->runs != NULL) run_drop(transfer->runs);
      free(transfer->segments);
      free(transfer);
    }
  }
  plan_remove_ended(core);
}
