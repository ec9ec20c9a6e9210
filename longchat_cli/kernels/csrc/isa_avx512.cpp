// The kernels in avx512 instructions.
#include <stdlib.h>

#include <new>

#include "isa.h"
#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define LONGCHAT_AVX512
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,prefer-vector-width=512")
#include "kernels.inl"

#include "attention.inl"

namespace longchat {
const Isa kAvx512 = {logits, enter, leave, attend, step, add_norm, rotate, gated};
}
#endif
