"""The list of all forms."""

from . import (
    forms_attention,
    forms_cache_home,
    forms_layout,
    forms_passes,
    forms_position,
    forms_refused,
    forms_rope,
    forms_shared,
    forms_write,
)

_FILES = [
    forms_rope,
    forms_layout,
    forms_write,
    forms_passes,
    forms_position,
    forms_attention,
    forms_cache_home,
    forms_refused,
    forms_shared,
]
FORMS = [form for file in _FILES for form in file.FORMS]
