#define TFSWITCH_KERNEL_NAMESPACE scalar
#include "cc/wire/half_kernels.inc"
