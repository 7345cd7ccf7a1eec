//! `weft dco`: data channel devices driven by hand. If the kernel has such devices, the first host's is the
//! kernel's; else all are Weft's own.

mod by_hand;
mod carriers;
mod common;
mod ends;
mod killed;
mod scenarios;
