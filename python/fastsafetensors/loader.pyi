from .v05.loader import *
