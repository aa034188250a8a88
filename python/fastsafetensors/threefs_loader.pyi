from .v05.threefs_loader import *
