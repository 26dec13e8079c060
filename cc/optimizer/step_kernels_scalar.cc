#define TFSWITCH_KERNEL_NAMESPACE scalar
#include "cc/optimizer/step_kernels.inc"
