from ._ranks.ranks_save import *
