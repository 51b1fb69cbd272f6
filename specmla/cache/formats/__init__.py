"""Row formats of the latent cache, one a file, and their names."""

from specmla.cache.formats.base import CacheFormat, FormatPart
from specmla.cache.formats.names import cache_format

__all__ = ["CacheFormat", "FormatPart", "cache_format"]
