from ._ranks_save import *
