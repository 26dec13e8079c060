// Compiled with -mavx2 where the target has it.
#define TFSWITCH_KERNEL_NAMESPACE avx2
#include "cc/optimizer/step_kernels.inc"
