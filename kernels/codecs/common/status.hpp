// What a decoder found wrong with a payload, in words.
#pragma once

#include "hybridcomp/status.hpp"

namespace hybridcomp {

const char* status_text(int code);

}  // namespace hybridcomp
