// One table of functions for each instruction set the library was built with.
#pragma once

#include <new>

#include "native.h"

namespace longchat {

struct Isa {
  void (*logits)(const LongchatHead*, const float*, float, const float*, float*, int, int);
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

// Whether there was memory enough for a call.
template <typename... Parameters, typename... Arguments>
int tried(void (*call)(Parameters...), Arguments... arguments) {
  try {
    call(arguments...);
    return 1;
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

}  // namespace longchat
