// Arithmetic of error feedback, for host and device (see arithmetic.hpp for the rules). T is float, or double
// for double data.
#pragma once

#include "hybridcomp/arithmetic.hpp"

namespace hybridcomp {

// Return a message's error of `corrected`. `weight` is 1, or the number of ranks where the message is of a
// mean.
template <typename T>
HC_HD T lost_of(T corrected, T decoded, T weight) {
  return (corrected - decoded) * weight;
}

// Return LoCo's moving average of messages' errors; `rest` is 1 - beta.
template <typename T>
HC_HD T averaged(T error, T lost, T beta, T rest) {
  return beta * error + rest * lost;
}

// Return the velocity of DGC and of Nesterov's momentum.
template <typename T>
HC_HD T moved(T velocity, T x, T momentum) {
  return momentum * velocity + x;
}

// Return Nesterov's step: x plus momentum times the velocity, which x has moved already.
template <typename T>
HC_HD T ahead(T velocity, T x, T momentum) {
  return x + momentum * velocity;
}

}  // namespace hybridcomp
