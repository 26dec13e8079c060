// The build compiles this file with -mavx2 if the target supports it.
#define TFSWITCH_KERNEL_NAMESPACE avx2
#include "cc/wire/half_kernels.inc"
