#include "convert.h"

#include <ATen/ATen.h>

namespace nxd {
namespace {

[[noreturn]] void refuse(const c10::IValue& value, const c10::TypePtr& type) {
  C10_THROW_ERROR(TypeError, c10::str("a ", value.tagKind(), " where the operator takes ", type->str()));
}

c10::Scalar number(const c10::IValue& value, const c10::TypePtr& type) {
  if (!value.isScalar()) refuse(value, type);
  return value.toScalar();
}

int64_t integer(const c10::IValue& value, const c10::TypePtr& type) {
  if (value.isBool()) return value.toBool();
  if (!value.isInt()) refuse(value, type);
  return value.toInt();
}

c10::IValue list(const c10::IValue& value, const c10::ListType& type, std::optional<int32_t> length) {
  const c10::TypePtr& element = type.getElementType();
  std::vector<c10::IValue> elements;
  if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) elements.push_back(convert(one, element, {}));
  } else if (value.isTuple()) {
    for (const c10::IValue& one : value.toTupleRef().elements()) elements.push_back(convert(one, element, {}));
  } else if (length && value.isScalar()) {
    elements.assign(*length, convert(value, element, {}));
  } else {
    refuse(value, c10::ListType::create(element));
  }
  c10::impl::GenericList result(element);
  for (c10::IValue& one : elements) result.push_back(std::move(one));
  return result;
}

} // namespace

c10::IValue number_as_tensor(const c10::IValue& number) {
  at::Tensor result = c10::scalar_to_tensor(number.toScalar());
  result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

c10::IValue convert(const c10::IValue& value, const c10::TypePtr& type, std::optional<int32_t> length) {
  switch (type->kind()) {
    case c10::TypeKind::OptionalType:
      return value.isNone() ? value : convert(value, type->expectRef<c10::OptionalType>().getElementType(), length);
    case c10::TypeKind::TensorType:
      if (value.isTensor()) return value;
      return number_as_tensor(number(value, type));
    case c10::TypeKind::NumberType:
      return c10::IValue(number(value, type));
    case c10::TypeKind::FloatType:
      return value.isDouble() ? value : c10::IValue(static_cast<double>(integer(value, type)));
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return integer(value, type);
    case c10::TypeKind::ListType:
      return list(value, type->expectRef<c10::ListType>(), length);
    case c10::TypeKind::BoolType:
      if (value.isBool()) return value;
      if (value.isInt()) return value.toInt() != 0;
      break;
    case c10::TypeKind::StringType:
      if (value.isString()) return value;
      break;
    case c10::TypeKind::DeviceObjType:
      if (value.isDevice()) return value;
      break;
    default:
      break;
  }
  refuse(value, type);
}

} // namespace nxd
