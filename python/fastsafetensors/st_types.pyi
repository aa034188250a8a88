from .v05.st_types import *
