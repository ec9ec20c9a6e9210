// One table of functions for each instruction set the library was built with.
#pragma once

#include "native.h"

namespace longchat {

struct Isa {
  void (*linear)(const LongchatLinear*, const float*, float, const float*, float*, int, int);
  void (*enter)(const LongchatModel*, const LongchatBlock*, const float*, int, const float*, const float*, int,
                uint16_t*, uint16_t*, uint16_t*);
  void (*leave)(const LongchatModel*, const LongchatBlock*, float*, int, const uint16_t*, int64_t, int64_t);
  void (*attend)(const LongchatAttention*);
  void (*step)(const LongchatStep*);
  decltype(&longchat_add_norm) add_norm;
  void (*rotate)(const LongchatModel*, const LongchatBlock*, const uint16_t* const[3], const int64_t[3], int,
                 const float*, const float*, int, uint16_t*, uint16_t*, uint16_t*);
  decltype(&longchat_gated) gated;
};

extern const Isa kPortable;
#if defined(__x86_64__)
extern const Isa kAvx2, kAvx512;
#endif

}  // namespace longchat
