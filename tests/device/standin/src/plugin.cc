// Where Paddle enters: a device type `npu`, which its fusion code accepts, made of the other files of this folder.
#include <cstring>

#include "kernels.h"
#include "memory.h"
#include "paddle/phi/backends/device_ext.h"
#include "settings.h"
#include "streams.h"
#include "xccl.h"

namespace standin {
namespace {

char device_type[] = "npu";
char sub_device_type[] = "standin";
thread_local int current_device = 0;

C_Status nothing() { return C_SUCCESS; }

C_Status nothing_for(const C_Device) { return C_SUCCESS; }

C_Status set_device(const C_Device device) {
  current_device = device->id;
  return C_SUCCESS;
}

C_Status get_device(const C_Device device) {
  device->id = current_device;
  return C_SUCCESS;
}

C_Status device_count(size_t* count) {
  *count = settings().devices;
  return C_SUCCESS;
}

C_Status device_list(size_t* devices) {
  for (size_t device = 0; device < settings().devices; ++device) devices[device] = device;
  return C_SUCCESS;
}

C_Status version(const C_Device, size_t* number) {
  *number = 1;
  return C_SUCCESS;
}

C_Status supported(const C_Device, bool* answer) {
  *answer = true;
  return C_SUCCESS;
}

void fill_device_interface(C_DeviceInterface* interface) {
  interface->initialize = nothing;
  interface->finalize = nothing;
  interface->init_device = nothing_for;
  interface->deinit_device = nothing_for;
  interface->set_device = set_device;
  interface->get_device = get_device;
  interface->get_device_count = device_count;
  interface->get_device_list = device_list;
  interface->get_compute_capability = version;
  interface->get_runtime_version = version;
  interface->get_driver_version = version;
  interface->is_float16_supported = supported;
  interface->is_bfloat16_supported = supported;
}

}  // namespace
}  // namespace standin

extern "C" void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = standin::device_type;
  params->sub_device_type = standin::sub_device_type;
  C_DeviceInterface* interface = params->interface;
  std::memset(interface, 0, sizeof(C_DeviceInterface));
  interface->size = sizeof(C_DeviceInterface);
  standin::load_settings();
  standin::fill_device_interface(interface);
  standin::fill_memory_interface(interface);
  standin::fill_stream_interface(interface);
  standin::fill_xccl_interface(interface);
  standin::register_cpu_kernels(standin::device_type);
}
