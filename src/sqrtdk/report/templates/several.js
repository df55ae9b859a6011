"use strict";
// The pictures of this page are drawn beforehand: nothing is left to do here.
