#define TFSWITCH_KERNEL_NAMESPACE scalar
#include "cc/serving/row_decode.inc"
