//! pure: views and builders of every header; checksums; split and merge of super-packets.
#![forbid(unsafe_code)]
