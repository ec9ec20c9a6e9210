// One table of functions for each instruction set the library was built with.
#pragma once

#include "native.h"

namespace longchat {

struct Isa {
  decltype(&longchat_linear) linear;
  decltype(&longchat_enter) enter;
  decltype(&longchat_leave) leave;
  decltype(&longchat_attend) attend;
  decltype(&longchat_add_norm) add_norm;
  decltype(&longchat_rotate) rotate;
  decltype(&longchat_gated) gated;
};

extern const Isa kPortable;
#if defined(__x86_64__)
extern const Isa kAvx2, kAvx512;
#endif

}  // namespace longchat
