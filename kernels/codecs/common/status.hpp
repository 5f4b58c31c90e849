// Error messages for a decoder's Status.
#pragma once

#include "hybridcomp/status.hpp"

namespace hybridcomp {

const char* status_text(int code);

}  // namespace hybridcomp
