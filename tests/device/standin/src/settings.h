// What the stand-in is told by environment variables, and how long a collective takes by them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace standin {

// Read when the plugin is loaded, and again by standin_reload(). The names are those of the variables.
struct Settings {
  size_t devices = 4;           // STANDIN_DEVICES: how many devices a process sees
  double latency_ms = 0.0;      // STANDIN_LATENCY_MS: what every collective takes, whatever its size
  double bandwidth_mb_s = 0.0;  // STANDIN_BANDWIDTH_MB_S: 10^6 bytes a second on a rank's link; 0: no limit
  double jitter_ms = 0.0;       // STANDIN_JITTER_MS: a rank is late by up to this in a collective, at random
  uint64_t seed = 0;            // STANDIN_SEED: of the jitter; other ranks and communicators differ
  std::string slowed;           // STANDIN_SLOWED: kinds, as in "all_gather,reduce_scatter"; empty: all of them
  double timeout_s = 60.0;      // STANDIN_TIMEOUT_S: after which a rank that waits for another ends its process
  size_t quarantine_mb = 64;    // STANDIN_QUARANTINE_MB: freed memory that is kept poisoned and watched

  // True if the delays are meant for collectives of this kind.
  bool slows(const std::string& kind) const;

  // Milliseconds that a collective takes on a link that carries `wire_bytes` of each rank.
  double duration_ms(double wire_bytes) const;
};

// The settings as they are now; a copy, for any thread.
Settings settings();

void load_settings();

void sleep_ms(double ms);

// Ends the process, with a message on stderr: a stand-in that goes on after a fault would hide it.
[[noreturn]] void give_up(const std::string& message);

}  // namespace standin
