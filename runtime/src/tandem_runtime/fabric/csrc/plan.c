/* Outgoing transfers: which write is posted next. Knows: pages, layers, windows. Does not know: why, or who the peer is.
 *
 * A transfer's pages come in runs: the pages of one plan item, in all layers. `ready` of a run's layers may be posted: all of them for pages
 * that are valid already, else as many as the layer counter has passed since the plan's base. Each link keeps its postable runs in a
 * heap by (base + layer, age): layer by layer across requests, the oldest first. One turn posts at most TDM_POST_BATCH writes on a link before
 * the next link gets its turn, and a full window or an EAGAIN only ends that link's turn.
 *
 * Stopping is exact because posting happens under the core's lock, one write at a time: once tdm_plan_abort, tdm_out_stop or tdm_link_close has
 * removed the runs, nothing of them is posted any more. A write that fails stops its transfer; nothing is posted twice.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

/* --- the heap --------------------------------------------------------------------------------------------------------------------- */

static bool before(const struct run *a, const struct run *b) {
  uint64_t due_a = a->base + a->layer, due_b = b->base + b->layer;
  return due_a != due_b ? due_a < due_b : a->age < b->age;
}

static void heap_put(struct link *link, size_t index, struct run *run) {
  link->heap[index] = run;
  run->heap_index = index;
}

static void heap_up(struct link *link, size_t index) {
  struct run *run = link->heap[index];
  for (; index > 0 && before(run, link->heap[(index - 1) / 2]); index = (index - 1) / 2) heap_put(link, index, link->heap[(index - 1) / 2]);
  heap_put(link, index, run);
}

static void heap_down(struct link *link, size_t index) {
  struct run *run = link->heap[index];
  for (size_t child; (child = 2 * index + 1) < link->heap_length; index = child) {
    if (child + 1 < link->heap_length && before(link->heap[child + 1], link->heap[child])) child++;
    if (!before(link->heap[child], run)) break;
    heap_put(link, index, link->heap[child]);
  }
  heap_put(link, index, run);
}

/* Room was made when the run was created: this cannot fail. */
static void heap_push(struct link *link, struct run *run) {
  link->heap[link->heap_length] = run;
  run->heap_index = link->heap_length++;
  heap_up(link, run->heap_index);
}

static void heap_remove(struct link *link, struct run *run) {
  size_t index = run->heap_index;
  if (index == NOT_IN_HEAP) return;
  struct run *moved = link->heap[--link->heap_length];
  run->heap_index = NOT_IN_HEAP;
  if (moved == run) return;
  heap_put(link, index, moved);
  heap_up(link, index);
  heap_down(link, moved->heap_index);
}

/* Makes room for one more run of the link, postable or not. */
static bool heap_reserve(struct link *link) {
  if (link->n_runs < link->heap_capacity) return true;
  size_t capacity = link->heap_capacity > 0 ? 2 * link->heap_capacity : 64;
  struct run **heap = realloc(link->heap, capacity * sizeof(struct run *));
  if (heap == NULL) return false;
  link->heap = heap;
  link->heap_capacity = capacity;
  return true;
}

/* --- transfers and runs -------------------------------------------------------------------------------------------------------------- */

static struct transfer **bucket(struct tdm_core *core, uint64_t id) {
  return &core->transfers[(id ^ id >> 14 ^ id >> 32) % TRANSFER_BUCKETS];
}

static struct transfer *find(struct tdm_core *core, uint64_t id) {
  struct transfer *transfer = *bucket(core, id);
  while (transfer != NULL && transfer->id != id) transfer = transfer->bucket_next;
  return transfer;
}

static void drop_run(struct run *run) {
  struct transfer *transfer = run->transfer;
  heap_remove(transfer->link, run);
  transfer->link->n_runs--;
  *(run->transfer_previous != NULL ? &run->transfer_previous->transfer_next : &transfer->runs) = run->transfer_next;
  if (run->transfer_next != NULL) run->transfer_next->transfer_previous = run->transfer_previous;
  if (run->plan != NULL) {
    *(run->plan_previous != NULL ? &run->plan_previous->plan_next : &run->plan->runs) = run->plan_next;
    if (run->plan_next != NULL) run->plan_next->plan_previous = run->plan_previous;
  }
  free(run);
}

static void add_run(struct run *run, struct transfer *transfer, struct plan *plan) {
  run->transfer = transfer;
  run->transfer_next = transfer->runs;
  if (transfer->runs != NULL) transfer->runs->transfer_previous = run;
  transfer->runs = run;
  transfer->link->n_runs++;
  run->plan = plan;
  if (plan != NULL) {
    run->plan_next = plan->runs;
    if (plan->runs != NULL) plan->runs->plan_previous = run;
    plan->runs = run;
  }
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
                          .nbytes = transfer->nbytes, .first_post_ns = transfer->first_post_ns,
                          .last_layer_ns = transfer->last_layer_ns, .last_completion_ns = transfer->last_completion_ns},
             NULL, 0);
}

static void stop(struct transfer *transfer) {
  transfer->stopped = true;
  while (transfer->runs != NULL) drop_run(transfer->runs);
}

/* All layers seen: the time of the last layer counts for the transfer when the run is its last. */
static void set_ready(struct run *run, uint32_t ready) {
  if (ready > run->layers) ready = run->layers;
  if (ready <= run->ready) return;
  run->ready = ready;
  if (run->last && ready == run->layers) run->transfer->last_layer_ns = tdm_now_ns();
  if (run->heap_index == NOT_IN_HEAP) heap_push(run->transfer->link, run);
}

/* --- posting ---------------------------------------------------------------------------------------------------------------------------- */

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
    drop_run(run);
    end_if_drained(core, transfer, false);
  } else if (run->layer == run->ready) {
    heap_remove(link, run);
  } else {
    heap_down(link, run->heap_index);
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

size_t plan_post(struct tdm_core *core) {
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

bool plan_has_work(struct tdm_core *core) {
  for (const struct link *link = core->links; link != NULL; link = link->next) {
    if (link->state == LINK_CONNECTED && link->heap_length > 0) return true;
  }
  return false;
}

void plan_write_done(struct tdm_core *core, struct op *op, int error) {
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
    core->stats.writes_completed++;
  } else {
    transfer->failed++;
    core->stats.writes_failed++;
    stop(transfer);
  }
  if (link->state != LINK_SHUT) end_if_drained(core, transfer, false); /* else all end together, by plan_link_closed */
}

void plan_link_closing(struct tdm_core *core, struct link *link) {
  for (struct transfer *transfer = link->transfers, *next; transfer != NULL; transfer = next) {
    next = transfer->link_next;
    stop(transfer);
    end_if_drained(core, transfer, false);
  }
}

void plan_link_closed(struct tdm_core *core, struct link *link) {
  core->writes_unfinished -= link->n_writes;
  while (link->transfers != NULL) end_if_drained(core, link->transfers, true);
}

/* --- the layer counter ---------------------------------------------------------------------------------------------------------------- */

static void bring_to(struct plan *plan, uint64_t done) {
  uint64_t ready = done > plan->base ? done - plan->base : 0;
  if (ready > plan->layers) ready = plan->layers;
  for (struct run *run = plan->runs; run != NULL; run = run->plan_next) set_ready(run, (uint32_t)ready);
}

/* A plan goes with its last run; until then it can be aborted. */
static void remove_ended_plans(struct tdm_core *core) {
  for (struct plan **at = &core->plans; *at != NULL;) {
    struct plan *plan = *at;
    if (plan->runs != NULL) {
      at = &plan->next;
      continue;
    }
    *at = plan->next;
    free(plan);
    core->stats.plans_pending--;
  }
}

size_t plan_watch(struct tdm_core *core) {
  size_t worked = 0;
  pthread_mutex_lock(&core->lock);
  if (core->plans != NULL) remove_ended_plans(core);
  if (core->plans != NULL && core->layer_word != NULL) {
    uint64_t done = atomic_load_explicit(core->layer_word, memory_order_acquire);
    if (done != core->layers_done) {
      core->layers_done = done;
      for (struct plan *plan = core->plans; plan != NULL; plan = plan->next) bring_to(plan, done);
      worked = 1;
    }
  }
  pthread_mutex_unlock(&core->lock);
  return worked;
}

/* --- the caller's side ------------------------------------------------------------------------------------------------------------------ */

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
  } else if (find(core, id) != NULL) {
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

void plan_forget(struct tdm_core *core, uint64_t id) {
  struct transfer **at = bucket(core, id);
  while (*at != NULL && (*at)->id != id) at = &(*at)->bucket_next;
  struct transfer *transfer = *at;
  if (transfer == NULL) return;
  *at = transfer->bucket_next;
  free(transfer->segments);
  free(transfer);
  core->stats.transfers_open--;
}

static int check_item(struct tdm_core *core, const tdm_plan_item *item) {
  const struct transfer *transfer = find(core, item->transfer);
  if (transfer == NULL) return -ENOENT;
  if (transfer->stopped || transfer->drained) return 0; /* its end is an event the caller has not read yet */
  for (size_t s = 0; s < transfer->n_segments; s++) {
    for (size_t i = 0; i < item->n_pages; i++) {
      if (!fits(core, transfer->link, &transfer->geometry, &transfer->segments[s], item->source_pages[i], item->target_pages[i])) return -ERANGE;
    }
  }
  return 0;
}

static struct run *make_run(struct tdm_core *core, const tdm_plan_item *item, uint64_t base) {
  struct run *run = calloc(1, sizeof *run + 2 * item->n_pages * sizeof(uint32_t));
  if (run == NULL) return NULL;
  run->heap_index = NOT_IN_HEAP;
  run->base = base;
  run->age = core->age++;
  run->n_pages = item->n_pages;
  run->last = item->last != 0;
  if (item->n_pages > 0) {
    memcpy(run->pages, item->source_pages, item->n_pages * sizeof(uint32_t));
    memcpy(run->pages + item->n_pages, item->target_pages, item->n_pages * sizeof(uint32_t));
  }
  return run;
}

int tdm_out_post(tdm_core *core, const tdm_plan_item *item) {
  core_lock(core);
  int rc = check_item(core, item);
  struct transfer *transfer = rc == 0 ? find(core, item->transfer) : NULL;
  if (transfer != NULL && !transfer->stopped && !transfer->drained) {
    struct run *run = heap_reserve(transfer->link) ? make_run(core, item, core->layers_done) : NULL;
    if (run == NULL) {
      rc = -ENOMEM;
    } else {
      run->layers = transfer->geometry.layers;
      add_run(run, transfer, NULL);
      set_ready(run, run->layers);
      core_wake(core);
    }
  }
  core_unlock(core);
  return rc;
}

int tdm_plan_publish(tdm_core *core, uint64_t base, const tdm_plan_item *items, size_t n_items) {
  struct plan *plan = calloc(1, sizeof *plan);
  if (plan == NULL) return -ENOMEM;
  plan->base = base;
  core_lock(core);
  int rc = core->layer_word == NULL ? -ENXIO : 0;
  for (const struct plan *other = core->plans; other != NULL && rc == 0; other = other->next) {
    if (other->base == base && other->runs != NULL) rc = -EEXIST;
  }
  for (size_t i = 0; i < n_items && rc == 0; i++) rc = check_item(core, &items[i]);
  for (size_t i = 0; i < n_items && rc == 0; i++) {
    struct transfer *transfer = find(core, items[i].transfer);
    if (transfer->stopped || transfer->drained) continue;
    struct run *run = heap_reserve(transfer->link) ? make_run(core, &items[i], base) : NULL;
    if (run == NULL) {
      rc = -ENOMEM;
      break;
    }
    run->layers = transfer->geometry.layers;
    if (run->layers > plan->layers) plan->layers = run->layers;
    add_run(run, transfer, plan);
  }
  if (rc == 0 && plan->runs != NULL) {
    plan->next = core->plans;
    core->plans = plan;
    core->stats.plans_pending++;
    bring_to(plan, core->layers_done); /* layers that are done already */
    core_wake(core);
  } else {
    while (plan->runs != NULL) drop_run(plan->runs);
    free(plan);
  }
  core_unlock(core);
  return rc;
}

int tdm_plan_abort(tdm_core *core, uint64_t base) {
  core_lock(core);
  for (struct plan *plan = core->plans; plan != NULL; plan = plan->next) {
    if (plan->base != base) continue;
    while (plan->runs != NULL) drop_run(plan->runs);
  }
  remove_ended_plans(core);
  core_unlock(core);
  return 0;
}

int tdm_out_stop(tdm_core *core, uint64_t id) {
  core_lock(core);
  struct transfer *transfer = find(core, id);
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
  struct transfer *transfer = find(core, id);
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
    } else if (!heap_reserve(link) || (run = make_run(core, &(tdm_plan_item){.transfer = id}, core->layers_done)) == NULL) {
      rc = -ENOMEM;
    } else {
      run->single = true;
      run->n_pages = 1; /* no page ids: the write is described in full */
      run->layers = 1;
      run->write.immediate = immediate;
      run->write.source_region = source_region;
      run->write.target_region = target_region;
      run->write.source_offset = source_offset;
      run->write.target_offset = target_offset;
      run->write.nbytes = nbytes;
      add_run(run, transfer, NULL);
      set_ready(run, 1);
      core_wake(core);
    }
  }
  core_unlock(core);
  return rc;
}

void plan_free(struct tdm_core *core) {
  for (size_t i = 0; i < TRANSFER_BUCKETS; i++) {
    for (struct transfer *transfer; (transfer = core->transfers[i]) != NULL;) {
      core->transfers[i] = transfer->bucket_next;
      while (transfer->runs != NULL) drop_run(transfer->runs);
      free(transfer->segments);
      free(transfer);
    }
  }
  remove_ended_plans(core);
}
