// Gives a CPU build of torch a device guard for CUDA, whose eight devices do nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
static c10::impl::DeviceGuardImplRegistrar registrar(
    c10::DeviceType::CUDA, new c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>());
