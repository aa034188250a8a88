from .v05.saver import *
