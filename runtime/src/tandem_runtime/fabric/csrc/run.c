/* Runs: the pages of one plan item, or one single write, in the order in which they are due. Knows: urgency. Does not know: how to write.
 *
 * A link's postable runs are a heap by (base + layer, age). A run that waits for layers is in no heap.
 */
#include <stdlib.h>
#include <string.h>

#include "core.h"

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

void run_heap_down(struct link *link, size_t index) {
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

void run_heap_remove(struct link *link, struct run *run) {
  size_t index = run->heap_index;
  if (index == NOT_IN_HEAP) return;
  struct run *moved = link->heap[--link->heap_length];
  run->heap_index = NOT_IN_HEAP;
  if (moved == run) return;
  heap_put(link, index, moved);
  heap_up(link, index);
  run_heap_down(link, moved->heap_index);
}

/* Makes room for one more run of the link, postable or not. */
bool run_reserve(struct link *link) {
  if (link->n_runs < link->heap_capacity) return true;
  size_t capacity = link->heap_capacity > 0 ? 2 * link->heap_capacity : 64;
  struct run **heap = realloc(link->heap, capacity * sizeof(struct run *));
  if (heap == NULL) return false;
  link->heap = heap;
  link->heap_capacity = capacity;
  return true;
}

struct run *run_make(struct tdm_core *core, const tdm_plan_item *item, uint64_t base, uint32_t layers) {
  struct run *run = calloc(1, sizeof *run + 2 * item->n_pages * sizeof(uint32_t));
  if (run == NULL) return NULL;
  run->heap_index = NOT_IN_HEAP;
  run->base = base;
  run->layers = layers;
  run->age = core->age++;
  run->n_pages = item->n_pages;
  run->last = item->last != 0;
  if (item->n_pages > 0) {
    memcpy(run->pages, item->source_pages, item->n_pages * sizeof(uint32_t));
    memcpy(run->pages + item->n_pages, item->target_pages, item->n_pages * sizeof(uint32_t));
  }
  return run;
}

void run_drop(struct run *run) {
  struct transfer *transfer = run->transfer;
  run_heap_remove(transfer->link, run);
  transfer->link->n_runs--;
  *(run->transfer_previous != NULL ? &run->transfer_previous->transfer_next : &transfer->runs) = run->transfer_next;
  if (run->transfer_next != NULL) run->transfer_next->transfer_previous = run->transfer_previous;
  if (run->plan != NULL) {
    *(run->plan_previous != NULL ? &run->plan_previous->plan_next : &run->plan->runs) = run->plan_next;
    if (run->plan_next != NULL) run->plan_next->plan_previous = run->plan_previous;
  }
  free(run);
}

void run_add(struct run *run, struct transfer *transfer, struct plan *plan) {
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

/* All layers seen: the time of the last layer, and what had crossed by then, count for the transfer when the run is its last. */
void run_set_ready(struct run *run, uint32_t ready) {
  if (ready > run->layers) ready = run->layers;
  if (ready <= run->ready) return;
  run->ready = ready;
  if (run->last && ready == run->layers) {
    run->transfer->last_layer_ns = tdm_now_ns();
    run->transfer->hidden_nbytes = run->transfer->completed_nbytes;
  }
  if (run->heap_index == NOT_IN_HEAP) heap_push(run->transfer->link, run);
}
