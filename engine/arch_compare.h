/* Whether two architectures are the same. */
#ifndef COP_ARCH_COMPARE_H
#define COP_ARCH_COMPARE_H

#include "engine/arch.h"

/* Compare every field.  Errors: COP_EFORMAT, which names the first field that differs, with both values. */
cop_status arch_compare(const arch *got, const arch *want, cop_error *err);

#endif
