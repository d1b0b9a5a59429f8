#include "settings.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace standin {
namespace {

// Never destroyed: threads of streams may still read them while the process ends.
std::mutex& guard() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

Settings& stored() {
  static auto* settings = new Settings;
  return *settings;
}

double number(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  if (*end != '\0' || value < 0.0) give_up(std::string(name) + "=" + text + " is not a number from 0");
  return value;
}

}  // namespace

bool Settings::slows(const std::string& kind) const {
  return slowed.empty() || ("," + slowed + ",").find("," + kind + ",") != std::string::npos;
}

double Settings::duration_ms(double wire_bytes) const {
  return latency_ms + (bandwidth_mb_s > 0.0 ? wire_bytes / (bandwidth_mb_s * 1e3) : 0.0);
}

Settings settings() {
  std::lock_guard<std::mutex> lock(guard());
  return stored();
}

void load_settings() {
  const Settings plain;
  Settings found;
  found.devices = static_cast<size_t>(number("STANDIN_DEVICES", static_cast<double>(plain.devices)));
  found.latency_ms = number("STANDIN_LATENCY_MS", plain.latency_ms);
  found.bandwidth_mb_s = number("STANDIN_BANDWIDTH_MB_S", plain.bandwidth_mb_s);
  found.jitter_ms = number("STANDIN_JITTER_MS", plain.jitter_ms);
  found.seed = static_cast<uint64_t>(number("STANDIN_SEED", 0.0));
  found.timeout_s = number("STANDIN_TIMEOUT_S", plain.timeout_s);
  found.quarantine_mb = static_cast<size_t>(number("STANDIN_QUARANTINE_MB", static_cast<double>(plain.quarantine_mb)));
  const char* slowed = std::getenv("STANDIN_SLOWED");
  found.slowed = slowed == nullptr ? "" : slowed;
  std::lock_guard<std::mutex> lock(guard());
  stored() = found;
}

void sleep_ms(double ms) {
  if (ms > 0.0) std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
}

void give_up(const std::string& message) {
  std::fprintf(stderr, "stand-in device: %s\n", message.c_str());
  std::fflush(stderr);
  std::_Exit(70);
}

}  // namespace standin

// For Python: takes over what os.environ says now. Collectives that have begun keep what they began with.
extern "C" void standin_reload() { standin::load_settings(); }
