"""The paged latent cache: row format, device pool, and the host's page accounting."""

from specmla.cache.blocks import BlockManager
from specmla.cache.formats import CacheFormat, cache_format
from specmla.cache.latent import LatentCache
from specmla.cache.layout import CacheLayout

__all__ = ["BlockManager", "CacheFormat", "CacheLayout", "LatentCache", "cache_format"]
