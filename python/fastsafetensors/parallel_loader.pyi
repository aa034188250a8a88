from .v05.parallel_loader import *
