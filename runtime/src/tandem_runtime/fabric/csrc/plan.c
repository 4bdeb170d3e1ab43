/* Plans: pages whose layers may leave as the layer counter moves. Knows: bases, the counter. Does not know: writes, windows, links.
 *
 * A plan is published before its step runs. Its runs are told how many layers are ready whenever the counter has moved, by however much; it
 * goes with its last run, and until then it can be withdrawn.
 */
#include <errno.h>
#include <stdlib.h>

#include "core.h"

static void bring_to(struct plan *plan, uint64_t done) {
  uint64_t ready = done > plan->base ? done - plan->base : 0;
  if (ready > plan->layers) ready = plan->layers;
  for (struct run *run = plan->runs; run != NULL; run = run->plan_next) run_set_ready(run, (uint32_t)ready);
}

/* A plan goes with its last run; until then it can be aborted. */
void plan_remove_ended(struct tdm_core *core) {
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
  if (core->plans != NULL) plan_remove_ended(core);
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

int tdm_plan_publish(tdm_core *core, uint64_t base, const tdm_plan_item *items, size_t n_items) {
  struct plan *plan = calloc(1, sizeof *plan);
  if (plan == NULL) return -ENOMEM;
  plan->base = base;
  core_lock(core);
  int rc = core->layer_word == NULL ? -ENXIO : 0;
  for (const struct plan *other = core->plans; other != NULL && rc == 0; other = other->next) {
    if (other->base == base && other->runs != NULL) rc = -EEXIST;
  }
  for (size_t i = 0; i < n_items && rc == 0; i++) rc = transfer_check(core, &items[i]);
  for (size_t i = 0; i < n_items && rc == 0; i++) {
    struct transfer *transfer = transfer_find(core, items[i].transfer);
    if (transfer->stopped || transfer->drained) continue;
    struct run *run = run_reserve(transfer->link) ? run_make(core, &items[i], base, transfer->geometry.layers) : NULL;
    if (run == NULL) {
      rc = -ENOMEM;
      break;
    }
    if (run->layers > plan->layers) plan->layers = run->layers;
    run_add(run, transfer, plan);
  }
  if (rc == 0 && plan->runs != NULL) {
    plan->next = core->plans;
    core->plans = plan;
    core->stats.plans_pending++;
    bring_to(plan, core->layers_done); /* layers that are done already */
    core_wake(core);
  } else {
    while (plan->runs != NULL) run_drop(plan->runs);
    free(plan);
  }
  core_unlock(core);
  return rc;
}

int tdm_plan_abort(tdm_core *core, uint64_t base) {
  core_lock(core);
  for (struct plan *plan = core->plans; plan != NULL; plan = plan->next) {
    if (plan->base != base) continue;
    while (plan->runs != NULL) run_drop(plan->runs);
  }
  plan_remove_ended(core);
  core_unlock(core);
  return 0;
}
