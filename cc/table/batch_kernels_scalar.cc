#define TFSWITCH_KERNEL_NAMESPACE scalar
#include "cc/table/batch_kernels.inc"
