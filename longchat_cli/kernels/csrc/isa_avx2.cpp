// The kernels in avx2 instructions.
#include <stdlib.h>

#include <new>

#include "isa.h"
#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define LONGCHAT_AVX2
#pragma GCC target("avx2,fma,f16c")
#include "kernels.inl"

#include "attention.inl"

namespace longchat {
const Isa kAvx2 = {logits, enter, leave, attend, step, add_norm, rotate, gated};
}
#endif
