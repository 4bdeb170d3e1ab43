/* Keyed BLAKE2s with a 16-byte digest (RFC 7693): seals frames. */
#ifndef TANDEM_BLAKE2S_H
#define TANDEM_BLAKE2S_H

#include <stddef.h>
#include <stdint.h>

struct blake2s {
  uint32_t h[8];
  uint64_t counted;      /* bytes compressed so far */
  uint8_t block[64];
  size_t filled;
};

void blake2s_begin(struct blake2s *state, const uint8_t key[32]);
void blake2s_update(struct blake2s *state, const uint8_t *data, size_t nbytes);
void blake2s_end(struct blake2s *state, uint8_t digest[16]);

#endif
