// Compiled with -mavx2 where the target has it.
#define TFSWITCH_KERNEL_NAMESPACE avx2
#include "cc/table/batch_kernels.inc"
