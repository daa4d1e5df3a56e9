/* Version of the interface, by which Python refuses a library that was built from other sources. */
#include "native.h"

int64_t zenps_version(void) {
    return ZENPS_VERSION;
}
