//! A stock OpenVPN server is replaced by `weft openvpn import` and `serve`; its clients and their profiles stay. The
//! referees are Debian's `openvpn` on both ends, and `openssl`, which makes all certificates.

mod bad_input;
mod cases;
mod hosts;
mod logins;
mod matrix;
mod minivpn;
mod moved;
mod pki;
mod refused;
mod seen;
mod stage;
mod watched;
mod way_out;
