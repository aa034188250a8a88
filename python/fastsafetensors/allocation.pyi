from .v05.allocation import *
