/* Keyed BLAKE2s-128, written from RFC 7693. Knows: bytes and a key. Does not know: frames.
 *
 * Python's hashlib.blake2s is the oracle in the tests; this copy exists because a PING is checked and answered without Python. */
#include "blake2s.h"

#include <string.h>

#include "tandem_fabric.h"

static const uint32_t iv[8] = {
    0x6A09E667u, 0xBB67AE85u, 0x3C6EF372u, 0xA54FF53Au, 0x510E527Fu, 0x9B05688Cu, 0x1F83D9ABu, 0x5BE0CD19u,
};

static const uint8_t sigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static uint32_t rotate_right(uint32_t word, unsigned bits) { return word >> bits | word << (32 - bits); }

static uint32_t load_le(const uint8_t *bytes) {
  return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static void mix(uint32_t v[16], unsigned a, unsigned b, unsigned c, unsigned d, uint32_t x, uint32_t y) {
  v[a] = v[a] + v[b] + x;
  v[d] = rotate_right(v[d] ^ v[a], 16);
  v[c] = v[c] + v[d];
  v[b] = rotate_right(v[b] ^ v[c], 12);
  v[a] = v[a] + v[b] + y;
  v[d] = rotate_right(v[d] ^ v[a], 8);
  v[c] = v[c] + v[d];
  v[b] = rotate_right(v[b] ^ v[c], 7);
}

static void compress(struct blake2s *state, const uint8_t block[64], int last) {
  uint32_t m[16], v[16];
  for (unsigned i = 0; i < 16; i++) m[i] = load_le(block + 4 * i);
  for (unsigned i = 0; i < 8; i++) {
    v[i] = state->h[i];
    v[i + 8] = iv[i];
  }
  v[12] ^= (uint32_t)state->counted;
  v[13] ^= (uint32_t)(state->counted >> 32);
  if (last) v[14] = ~v[14];
  for (unsigned round = 0; round < 10; round++) {
    const uint8_t *s = sigma[round];
    mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
    mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
    mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
    mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
    mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
    mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
    mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
    mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
  }
  for (unsigned i = 0; i < 8; i++) state->h[i] ^= v[i] ^ v[i + 8];
}

void blake2s_begin(struct blake2s *state, const uint8_t key[32]) {
  memcpy(state->h, iv, sizeof iv);
  state->h[0] ^= 0x01010000u ^ 32u << 8 ^ TDM_MAC_NBYTES; /* depth 1, fanout 1, key and digest lengths */
  state->counted = 0;
  memset(state->block, 0, sizeof state->block);
  memcpy(state->block, key, 32); /* the key, padded to a block, is the first block */
  state->filled = sizeof state->block;
}

void blake2s_update(struct blake2s *state, const uint8_t *data, size_t nbytes) {
  while (nbytes > 0) {
    if (state->filled == sizeof state->block) { /* only now: the last block is compressed with its flag by blake2s_end */
      state->counted += sizeof state->block;
      compress(state, state->block, 0);
      state->filled = 0;
    }
    size_t take = sizeof state->block - state->filled;
    if (take > nbytes) take = nbytes;
    memcpy(state->block + state->filled, data, take);
    state->filled += take;
    data += take;
    nbytes -= take;
  }
}

void blake2s_end(struct blake2s *state, uint8_t digest[16]) {
  state->counted += state->filled;
  memset(state->block + state->filled, 0, sizeof state->block - state->filled);
  compress(state, state->block, 1);
  for (unsigned i = 0; i < TDM_MAC_NBYTES; i++) digest[i] = (uint8_t)(state->h[i / 4] >> 8 * (i % 4));
}

void tdm_mac(const uint8_t key[TDM_KEY_NBYTES], const uint8_t *data, size_t nbytes, uint8_t mac[TDM_MAC_NBYTES]) {
  struct blake2s state;
  blake2s_begin(&state, key);
  blake2s_update(&state, data, nbytes);
  blake2s_end(&state, mac);
}
