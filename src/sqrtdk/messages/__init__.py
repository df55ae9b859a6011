"""Sentences for people: each has an id, values and one text a language in the catalogue beside this file."""

from sqrtdk.messages._catalogue import Text as Text
from sqrtdk.messages._catalogue import say as say
from sqrtdk.messages._catalogue import unfilled as unfilled
from sqrtdk.messages._message import Message as Message
from sqrtdk.messages._message import fields as fields
from sqrtdk.messages._message import id_of as id_of
from sqrtdk.messages._message import joined as joined
from sqrtdk.messages._message import mentions as mentions
from sqrtdk.messages._message import named as named
from sqrtdk.messages._message import recorded as recorded
from sqrtdk.messages._message import said as said
from sqrtdk.messages._message import text as text
from sqrtdk.messages._message import word as word
