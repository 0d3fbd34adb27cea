"""Operations: health routes, metrics and logs."""
