/* Counts the immediates of incoming transfers and says when the last write has landed. Knows: slots, generations, expected counts. Does not
 * know: pages, requests, peers.
 *
 * A counter is armed before DISPATCH leaves, so no write can arrive early. An immediate whose generation is not its slot's belongs to a
 * transfer that has ended: it is counted as stale and changes nothing; so is one of a slot that is not armed any more. An immediate of a
 * slot that never was armed, or of an unknown kind, is counted as unknown. The caller and the progress thread meet under the core's lock.
 */
#include <errno.h>

#include "core.h"

enum { SLOT_BITS = 14, GEN_BITS = 16 };
_Static_assert(TDM_SLOTS == 1 << SLOT_BITS, "the immediate's slot");

/* A counter leaves the sums by which the thread decides how long to sleep, is changed, and enters them again. */
static void leave(struct tdm_core *core, const struct counter *counter) {
  if (!counter->armed || counter->reached) return;
  core->counters_waiting--;
  if (counter->count > 0) core->counters_receiving--;
}

static void enter(struct tdm_core *core, const struct counter *counter) {
  if (!counter->armed || counter->reached) return;
  core->counters_waiting++;
  if (counter->count > 0) core->counters_receiving++;
}

static void report(struct tdm_core *core, uint32_t slot, const struct counter *counter) {
  core_event(core, &(tdm_event){.type = TDM_EV_COUNT, .slot = slot, .gen = counter->gen, .count = counter->count}, NULL, 0);
}

/* Tells a count that has come to equal its expectation, once for each expectation. */
static void check(struct tdm_core *core, uint32_t slot, struct counter *counter) {
  if (counter->reached || counter->count != counter->expected) return;
  counter->reached = true;
  report(core, slot, counter);
}

void counters_immediate(struct tdm_core *core, uint32_t immediate) {
  uint32_t slot = immediate & (TDM_SLOTS - 1);
  uint32_t gen = immediate >> SLOT_BITS & ((1u << GEN_BITS) - 1);
  uint32_t kind = immediate >> (SLOT_BITS + GEN_BITS);
  struct counter *counter = &core->counters[slot];
  if (kind > TDM_IMM_PROBE || counter->gen == 0) {
    core->stats.immediates_unknown++;
    return;
  }
  if (counter->gen != gen || !counter->armed) {
    core->stats.immediates_stale++;
    return;
  }
  core->stats.immediates++;
  leave(core, counter);
  counter->count++;
  check(core, slot, counter);
  enter(core, counter);
}

/* The armed counter of (slot, gen), or NULL. */
static struct counter *find(struct tdm_core *core, uint32_t slot, uint32_t gen) {
  if (slot >= TDM_SLOTS || gen == 0 || core->counters[slot].gen != gen || !core->counters[slot].armed) return NULL;
  return &core->counters[slot];
}

int tdm_counter_arm(tdm_core *core, uint32_t slot, uint32_t gen, uint64_t expected) {
  if (slot >= TDM_SLOTS || gen == 0 || gen >= 1u << GEN_BITS) return -EINVAL;
  core_lock(core);
  struct counter *counter = &core->counters[slot];
  int rc = counter->armed ? -EBUSY : 0;
  if (rc == 0) {
    *counter = (struct counter){.gen = gen, .armed = true, .expected = expected};
    check(core, slot, counter);
    enter(core, counter);
  }
  core_unlock(core);
  return rc;
}

int tdm_counter_expect(tdm_core *core, uint32_t slot, uint32_t gen, uint64_t expected) {
  core_lock(core);
  struct counter *counter = find(core, slot, gen);
  if (counter != NULL) {
    leave(core, counter);
    counter->expected = expected;
    counter->reached = false;
    check(core, slot, counter);
    enter(core, counter);
  }
  core_unlock(core);
  return counter != NULL ? 0 : -ENOENT;
}

uint64_t tdm_counter_read(tdm_core *core, uint32_t slot, uint32_t gen) {
  core_lock(core);
  const struct counter *counter = find(core, slot, gen);
  uint64_t count = counter != NULL ? counter->count : 0;
  core_unlock(core);
  return count;
}

int tdm_counter_disarm(tdm_core *core, uint32_t slot, uint32_t gen) {
  core_lock(core);
  struct counter *counter = find(core, slot, gen);
  if (counter != NULL) {
    leave(core, counter);
    counter->armed = false; /* the generation stays: what is late is known as stale */
  }
  core_unlock(core);
  return counter != NULL ? 0 : -ENOENT;
}
