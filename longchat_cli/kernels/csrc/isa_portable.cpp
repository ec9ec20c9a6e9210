// The kernels in portable instructions.
#include <stdlib.h>

#include <new>

#include "isa.h"
#include "threads.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif
#include "kernels.inl"

#include "attention.inl"

namespace longchat {
const Isa kPortable = {logits, enter, leave, attend, step, add_norm, rotate, gated};
}
